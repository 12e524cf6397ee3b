"""Set-up of Triton's interpreter, where ``TRITON_INTERPRET=1`` asks for it."""

from magi_serve.kernels.capabilities import triton_interprets

if triton_interprets():
    from magi_serve.kernels.ffa import triton_attention
    from magi_serve.testing import fix_interpreter

    fix_interpreter()
    # As if on a chip with few multiprocessors: keys are split all the same, into few programs.
    triton_attention._num_sms = lambda device: 8
