"""Operators of the decoder: PyTorch references, fused Triton kernels beside them, and one dispatch.

reference.py says what an operator means; triton_kernels.py does the same on a GPU; dispatch.py decides per
operator, counts launches, and says why a fused kernel is not used. Triton is not imported without CUDA.
"""
