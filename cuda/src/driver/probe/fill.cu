// y[i] = i for i < n, rounded to bf16: the proof that kernels are compiled, loaded and run on this machine.
// y [n] bf16; grid ceil(n / blockDim.x); bytes moved: 2 n, written.

struct FillParams {
    bf16* y;
    int n;
    int unused;
};
static_assert(sizeof(FillParams) == 16, "as in prove.rs");

extern "C" __global__ void fill(const __grid_constant__ FillParams p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.y[i] = __float2bfloat16(static_cast<float>(i));
}
