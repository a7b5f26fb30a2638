// y[i] = i for i < n, rounded to bf16: the proof that kernels are compiled, loaded and run on this machine.
// y [n] bf16; grid ceil(n / blockDim.x); bytes moved: 2 n, written.

extern "C" __global__ void fill(bf16* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2bfloat16(static_cast<float>(i));
}
