// The wgmma instructions: m64nNk16, both operands in shared memory, f32 accumulators (PTX ISA, "Asynchronous warpgroup-level matrix
// instructions"). Included only by platform_cuda.h. The operand lists alone differ with N.
#pragma once

namespace aristos::dev {

// `N / 2` operands "+f"(acc[i]) starting at acc[base].
#define ARISTOS_ACC4(b) "+f"(acc[b]), "+f"(acc[b + 1]), "+f"(acc[b + 2]), "+f"(acc[b + 3])
#define ARISTOS_ACC16(b) ARISTOS_ACC4(b), ARISTOS_ACC4(b + 4), ARISTOS_ACC4(b + 8), ARISTOS_ACC4(b + 12)
#define ARISTOS_ACC32(b) ARISTOS_ACC16(b), ARISTOS_ACC16(b + 16)
#define ARISTOS_ACC64(b) ARISTOS_ACC32(b), ARISTOS_ACC32(b + 32)
#define ARISTOS_ACC128(b) ARISTOS_ACC64(b), ARISTOS_ACC64(b + 64)

#define ARISTOS_WGMMA_64(TYPE) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
        "%32, %33, p, 1, 1, %35, %36;\n}\n" \
        : ARISTOS_ACC32(0) \
        : "l"(desc_a), "l"(desc_b), "r"(int(accumulate)), "n"(TRANS_A), "n"(TRANS_B))

#define ARISTOS_WGMMA_128(TYPE) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "%64, %65, p, 1, 1, %67, %68;\n}\n" \
        : ARISTOS_ACC64(0) \
        : "l"(desc_a), "l"(desc_b), "r"(int(accumulate)), "n"(TRANS_A), "n"(TRANS_B))

#define ARISTOS_WGMMA_256(TYPE) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
        "%128, %129, p, 1, 1, %131, %132;\n}\n" \
        : ARISTOS_ACC128(0) \
        : "l"(desc_a), "l"(desc_b), "r"(int(accumulate)), "n"(TRANS_A), "n"(TRANS_B))

// D[64, N] = A[64, 16] B[16, N] (+ D): `acc[i]` of thread t of the warpgroup is row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2),
// column 8 (i / 4) + 2 (t % 4) + i % 2. TRANS: 0, the operand is K-major; 1, MN-major (gemm.h).
template <class T, int N, int TRANS_A, int TRANS_B>
DEVICE void wgmma(float (&acc)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
    static_assert(N == 64 || N == 128 || N == 256, "only these shapes are written out");
    static_assert((TRANS_A | TRANS_B) >> 1 == 0, "TRANS is 0 or 1");
    constexpr bool bf16 = is_bf16<T>;
    if constexpr (N == 64 && bf16) ARISTOS_WGMMA_64("bf16");
    else if constexpr (N == 64) ARISTOS_WGMMA_64("f16");
    else if constexpr (N == 128 && bf16) ARISTOS_WGMMA_128("bf16");
    else if constexpr (N == 128) ARISTOS_WGMMA_128("f16");
    else if constexpr (N == 256 && bf16) ARISTOS_WGMMA_256("bf16");
    else if constexpr (N == 256) ARISTOS_WGMMA_256("f16");
}

#undef ARISTOS_WGMMA_64
#undef ARISTOS_WGMMA_128
#undef ARISTOS_WGMMA_256
#undef ARISTOS_ACC4
#undef ARISTOS_ACC16
#undef ARISTOS_ACC32
#undef ARISTOS_ACC64
#undef ARISTOS_ACC128

}  // namespace aristos::dev
