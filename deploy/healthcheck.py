"""Exit 0 if the service answers 200 at ``HEALTH_URL``, by default its ``/ready`` on port 8000."""

import os
import ssl
import sys
import urllib.request


def main() -> None:
    url = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/ready")
    tls = ssl._create_unverified_context()  # its certificate names the host, not this address
    # No proxy that the environment may name: the service is in this container.
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=5) as answer:
            answer.read()
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
