// platform.h on a CPU. A block is an OS thread and a CUDA thread one of its fibers (simt.h). Primitives that involve other threads or
// take effect late are in the runtime (simt.cpp, tensor.cpp, copies.cpp, network.cpp), the others here.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#define ARISTOS_HOPPER 1
#define DEVICE inline __attribute__((always_inline))
#define UNROLL
#define ROLLED
#define OUTLINE inline
#define KERNEL(name, max_threads, min_blocks)                               \
    inline constexpr ::aristos::u32 max_threads_of_##name = (max_threads); \
    extern "C" void name
#define CLUSTER_KERNEL(name, max_threads) KERNEL(name, max_threads, 1)
#define REGISTER_KERNEL(name) \
    static const ::aristos::dev::Registration registration_of_##name(#name, max_threads_of_##name, &name);
#define REGISTER_CLUSTER_KERNEL(name) \
    static const ::aristos::dev::Registration registration_of_##name(#name, max_threads_of_##name, &name, true);

namespace aristos::dev {

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<Bf16> = true;

// ---- kernels by name

class Registration {
  public:
    template <class... Parameters>
    Registration(const char* kernel, u32 max, void (*function)(Parameters...), bool of_clusters = false)
        : name(kernel), max_threads(max), clusters(of_clusters), erased(reinterpret_cast<void (*)()>(function)), next(first) {
        static_assert(sizeof...(Parameters) <= 4, "a kernel takes at most 4 parameters");
        static_assert((std::is_trivially_copyable_v<Parameters> && ...), "parameters are copied as bytes");
        call = [](void (*f)(), void** args) {
            expand(reinterpret_cast<void (*)(Parameters...)>(f), args, std::index_sequence_for<Parameters...>());
        };
        first = this;
    }
    const char* name;
    u32 max_threads;
    bool clusters;  // for clusters of two blocks
    void (*erased)();
    void (*call)(void (*)(), void** args);
    const Registration* next;
    static const Registration* first;

  private:
    template <class... Parameters, std::size_t... I>
    static void expand(void (*f)(Parameters...), void** args, std::index_sequence<I...>) {
        (void)args;
        f(*static_cast<Parameters*>(args[I])...);
    }
};

// ---- thread and block numbers

struct ThreadContext {
    u32 thread, threads, block, blocks;
    char* shared;
};
extern __thread ThreadContext* current __attribute__((tls_model("initial-exec")));

DEVICE u32 thread() { return current->thread; }
DEVICE u32 threads() { return current->threads; }
DEVICE u32 block() { return current->block; }
DEVICE u32 blocks() { return current->blocks; }
DEVICE u32 lane() { return current->thread % 32; }
DEVICE u32 warp() { return current->thread / 32; }
DEVICE char* shared() { return current->shared; }

// ---- elements

DEVICE float bits_to_float(u32 bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
DEVICE u32 float_to_bits(float f) {
    u32 bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}
DEVICE float to_float(Bf16 v) { return bits_to_float(u32(v.bits) << 16); }
DEVICE float to_float(F16 v) {
    _Float16 h;
    std::memcpy(&h, &v.bits, 2);
    return float(h);
}
// Round to nearest, ties to even; NaN becomes 0x7fff, as in PTX.
template <class T> DEVICE T from_float(float f) {
    if (f != f) return T{0x7fff};
    if constexpr (is_bf16<T>) {
        const u32 bits = float_to_bits(f);
        return T{u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    } else {
        const _Float16 h = _Float16(f);
        T v;
        std::memcpy(&v.bits, &h, 2);
        return v;
    }
}
template <class T> DEVICE u32 pack(float lo, float hi) {
    return u32(from_float<T>(lo).bits) | u32(from_float<T>(hi).bits) << 16;
}
template <class T> DEVICE void unpack(u32 v, float& lo, float& hi) {
    lo = to_float(T{u16(v)});
    hi = to_float(T{u16(v >> 16)});
}

DEVICE float exp_(float x) { return expf(x); }
DEVICE float log_(float x) { return logf(x); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE float erf_(float x) { return erff(x); }
DEVICE float exp2_(float x) { return exp2f(x); }
DEVICE float inverse_(float x) { return 1.0f / x; }

// ---- block and warp (simt.cpp)

void sync_block();
u32 sync_block_or(bool v);
void named_barrier(u32 id, u32 count);
void sync_warp();
u64 exchange_shfl(u64 v, int from);
u64 exchange_xor(u64 v, int mask);
u64 exchange_up(u64 v, u32 delta);
u32 ballot(bool v);
DEVICE u32 shfl(u32 v, int from) { return u32(exchange_shfl(v, from)); }
DEVICE u64 shfl(u64 v, int from) { return exchange_shfl(v, from); }
DEVICE float shfl(float v, int from) { return bits_to_float(u32(exchange_shfl(float_to_bits(v), from))); }
DEVICE u32 shfl_xor(u32 v, int mask) { return u32(exchange_xor(v, mask)); }
DEVICE u64 shfl_xor(u64 v, int mask) { return exchange_xor(v, mask); }
DEVICE float shfl_xor(float v, int mask) { return bits_to_float(u32(exchange_xor(float_to_bits(v), mask))); }
DEVICE u32 shfl_up(u32 v, u32 delta) { return u32(exchange_up(v, delta)); }
DEVICE u64 shfl_up(u64 v, u32 delta) { return exchange_up(v, delta); }
DEVICE float shfl_up(float v, u32 delta) { return bits_to_float(u32(exchange_up(float_to_bits(v), delta))); }
void pause();

// ---- memory

[[noreturn]] void fail_misaligned(const void* p);
// load16 and store16 are for global memory only (platform_cuda.h).
DEVICE bool is_in_shared(const void* p) {
    return current && reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(current->shared) < 227 << 10;
}
DEVICE bool is_no_vector(const void* p) { return __builtin_expect(reinterpret_cast<std::uintptr_t>(p) % 16 != 0 || is_in_shared(p), 0); }

DEVICE Vec16 load16(const void* p) {
    if (is_no_vector(p)) fail_misaligned(p);
    Vec16 v;
    std::memcpy(&v, __builtin_assume_aligned(p, 16), 16);
    return v;
}
DEVICE Vec16 load16_stream(const void* p) { return load16(p); }
// For tests: called on every prefetch of any block, unless null.
extern void (*prefetch_hook)(const void*);
DEVICE void prefetch_l2(const void* p) {
    if (prefetch_hook) prefetch_hook(p);
}
DEVICE void store16(void* p, Vec16 v) {
    if (is_no_vector(p)) fail_misaligned(p);
    std::memcpy(__builtin_assume_aligned(p, 16), &v, 16);
}
DEVICE void store16_stream(void* p, Vec16 v) { store16(p, v); }

DEVICE u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE u64 load_acquire_sys(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE u32 load_relaxed(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE void store_relaxed(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE void store_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE void store_release(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
bool store_is_lost();  // injected faults
void delay_signaller();
DEVICE void store_release_sys(u64* p, u64 v) {
    if (!store_is_lost()) __atomic_store_n(p, v, __ATOMIC_RELEASE);
    delay_signaller();
}
DEVICE u32 fetch_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE u64 fetch_add(u64* p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE u32 fetch_add_acq_rel(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEVICE u32 fetch_max(u32* p, u32 v) {
    u32 old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
DEVICE bool compare_swap(u32* p, u32 expected, u32 v) {
    return __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
#ifdef ARISTOS_TSAN
// ThreadSanitizer does not support fences: here every fence synchronises with every earlier fence, which hides some races but reports no
// false ones.
void fence_for_tsan();
DEVICE void fence_gpu() { fence_for_tsan(); }
#else
DEVICE void fence_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif
void note_fence_sys();  // required before puts and signals
DEVICE void fence_sys() {
    fence_gpu();
    note_fence_sys();
}

DEVICE u32 shared_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE u64 shared_add(u64* p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE u32 shared_add_acq_rel(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEVICE float shared_add(float* p, float v) {
    // Threads of a block never run concurrently and are not preempted here.
    u32* word = reinterpret_cast<u32*>(p);
    const float old = bits_to_float(__atomic_load_n(word, __ATOMIC_RELAXED));
    __atomic_store_n(word, float_to_bits(old + v), __ATOMIC_RELAXED);
    return old;
}

u64 nanoseconds();  // simt.cpp
DEVICE u64 cycles() { return nanoseconds(); }

// ---- asynchronous copies (copies.cpp), ldmatrix and mma (tensor.cpp)

void cp_async16(void* smem, const void* global, bool valid);
void cp_async_commit();
void cp_async_wait_group(u32 n);
template <int N> DEVICE void cp_async_wait() { cp_async_wait_group(N); }

void ldmatrix_x4(u32 (&r)[4], const void* smem_row);
void ldmatrix_x4_trans(u32 (&r)[4], const void* smem_row);
void mma_16x8x16(float* d, const u32* a, const u32* b, bool bf16);
template <class T> DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_16x8x16(d, a, b, is_bf16<T>);
}

// ---- one-sided (network.cpp)

void put_block(void* dst_mine, const void* src, u64 bytes, u32 pe);
void fence_puts();
void signal_set(u64* signal_mine, u64 value, u32 pe);
void quiet_puts();
void acquire_puts(const u64* word_mine);
u32 my_pe();
u32 n_pes();

// ---- Hopper: mbarriers and TMA (copies.cpp, stores.cpp), stmatrix and wgmma (tensor.cpp)

void mbarrier_init(u64* bar, u32 count);
void mbarrier_inval(u64* bar);
DEVICE void mbarrier_fence_init() {}
void mbarrier_arrive(u64* bar, u32 count = 1);
void mbarrier_arrive_expect(u64* bar, u32 bytes);
bool mbarrier_test(u64* bar, u32 parity);
void mbarrier_wait(u64* bar, u32 parity);
void cp_async_mbarrier_arrive(u64* bar);
void fence_proxy_async();
void tma_load_2d(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row);
void tma_load_3d(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, i32 item);
DEVICE void tensor_map_fence(const TensorMap*) {}
DEVICE void tensor_maps_written() {}

void stmatrix_x4(void* smem_row, const u32 (&r)[4]);
void tma_store_2d(const TensorMap* map, i32 col, i32 row, const void* smem);
void bulk_commit();
void bulk_wait_group(u32 n, bool read);
template <int N> DEVICE void bulk_wait_read() { bulk_wait_group(N, true); }
template <int N> DEVICE void bulk_wait() { bulk_wait_group(N, false); }
DEVICE void fence_proxy_async_global() {}

// ---- clusters of two blocks (cluster.cpp)

u32 cluster_rank();
void cluster_sync();
const void* cluster_address(const void* p, u32 rank);
template <class P> DEVICE const P* cluster_shared(const P* p, u32 rank) { return static_cast<const P*>(cluster_address(p, rank)); }
// Inline, not in the runtime, so that ThreadSanitizer sees it.
DEVICE u32 cluster_add_acq_rel(u32* p, u32 v, u32 rank) { return __atomic_fetch_add(const_cast<u32*>(cluster_shared(p, rank)), v, __ATOMIC_ACQ_REL); }
void mbarrier_arrive_remote(u64* bar, u32 rank);
inline void mbarrier_arrive_remote_relaxed(u64* bar, u32 rank) { mbarrier_arrive_remote(bar, rank); }
DEVICE void mbarrier_wait_cluster(u64* bar, u32 parity) { mbarrier_wait(bar, parity); }
void fence_proxy_async_cluster();
void tma_load_3d_multicast(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, i32 item);

void wgmma_fence();
void wgmma_commit();
void wgmma_wait_group(u32 n);
template <int N> DEVICE void wgmma_wait() { wgmma_wait_group(N); }
template <int K> DEVICE void wgmma_fence_operand(float (&)[K]) {}
u64 smem_descriptor(const void* smem, u32 lbo_bytes, u32 sbo_bytes);
void wgmma_64xnx16(float* acc, u32 n, u64 desc_a, u64 desc_b, bool accumulate, bool bf16, bool trans_a, bool trans_b);
template <class T, int N, int TRANS_A, int TRANS_B>
DEVICE void wgmma(float (&acc)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
    static_assert(N == 64 || N == 128 || N == 256, "only these shapes are written out");
    static_assert((TRANS_A | TRANS_B) >> 1 == 0, "TRANS is 0 or 1");
    wgmma_64xnx16(acc, N, desc_a, desc_b, accumulate, is_bf16<T>, TRANS_A, TRANS_B);
}
// Registers are not counted here; only the instruction's bounds are checked.
template <int N> DEVICE void setmaxnreg_inc() { static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg"); }
template <int N> DEVICE void setmaxnreg_dec() { static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg"); }

}  // namespace aristos::dev
