// Compares our reading of the PTX ISA with CuTe (CUTLASS): fragments of mma, ldmatrix and wgmma, positions in swizzled shared memory, and
// wgmma's descriptors. Our side consists of the layouts of the emulated tensor cores (host/fragments.h), with which the GEMMs are tested,
// and of the code of the Hopper kernels (gemm_hopper_stage.h, platform_cuda_hopper.h). Needs no GPU, but the headers of CUTLASS and CUDA
// (tests/kernels.rs).

// CuTe converts pointers to shared-memory addresses with this function. Here they are offsets in `buffer`, which stands for the emulator's
// shared memory.
#include <cstddef>
constexpr std::size_t BUFFER_BYTES = 1 << 18;
alignas(1024) static char buffer[BUFFER_BYTES];
static std::size_t __cvta_generic_to_shared(const void* p) { return std::size_t(static_cast<const char*>(p) - buffer); }
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
#include <cute/tensor.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "../gemm_hopper.h"
#include "../host/fragments.h"
#include "testing.h"

// The GPU's header with the emulator's shared memory; its instructions are never called.
namespace gpu {
using aristos::TensorMap, aristos::u16, aristos::u32, aristos::u64, aristos::i32;
namespace dev {
template <class T> constexpr bool is_bf16 = false;
static u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
}  // namespace dev
}  // namespace gpu
#define aristos gpu
#include "../platform_cuda_hopper.h"
#undef aristos

namespace aristos {

using cute::GMMA::Major;
// Any 16-bit type; layouts do not depend on it.
using Element = cutlass::bfloat16_t;


// ---- mma and ldmatrix: CuTe's layouts map (lane, value) to an element's index.

template <class Operation> static void check_mma() {
    using Traits = cute::MMA_Traits<Operation>;
    const typename Traits::ALayout a{};
    const typename Traits::BLayout b{};
    const typename Traits::CLayout d{};
    for (u32 lane = 0; lane < 32; ++lane) {
        for (u32 v = 0; v < 8; ++v) {
            const host::Coord at = host::mma_a(lane, v / 2, v % 2);
            CHECK(u32(a(lane, v)) == at.row + 16 * at.col, "A, lane %u, value %u", lane, v);
        }
        for (u32 v = 0; v < 4; ++v) {
            const host::Coord at = host::mma_b(lane, v / 2, v % 2), of_d = host::mma_d(lane, v);
            CHECK(u32(b(lane, v)) == at.col + 8 * at.row, "B, lane %u, value %u", lane, v);
            CHECK(u32(d(lane, v)) == of_d.row + 16 * of_d.col, "D, lane %u, value %u", lane, v);
        }
    }
}
CASE(fragments_of_mma) {
    check_mma<cute::SM80_16x8x16_F32BF16BF16F32_TN>();
    check_mma<cute::SM80_16x8x16_F32F16F16F32_TN>();
}

template <class Operation> static void check_ldmatrix(bool transposed) {
    using Traits = cute::Copy_Traits<Operation>;
    const typename Traits::SrcLayout from{};
    const typename Traits::DstLayout to{};
    // By bit index: the lane of the row, and the position in the row.
    std::vector<std::pair<u32, u32>> source(32 * 128);
    for (u32 lane = 0; lane < 32; ++lane) {
        for (u32 bit = 0; bit < 128; ++bit) source[u32(from(lane, bit))] = {lane, bit};
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        for (u32 half = 0; half < 8; ++half) {
            const auto [row, bit] = source[u32(to(lane, half * 16))];
            const host::Coord at = host::ldmatrix(lane, half % 2, transposed);
            CHECK(row == half / 2 * 8 + at.row && bit == at.col * 16, "lane %u, half %u: row %u, bit %u", lane, half, row, bit);
        }
    }
}
// The reverse of an ldmatrix load: CuTe's source is registers here, its destination the rows.
CASE(fragments_of_stmatrix) {
    using Traits = cute::Copy_Traits<cute::SM90_U32x4_STSM_N>;
    const typename Traits::SrcLayout from{};
    const typename Traits::DstLayout to{};
    std::vector<std::pair<u32, u32>> target(32 * 128);
    for (u32 lane = 0; lane < 32; ++lane) {
        for (u32 bit = 0; bit < 128; ++bit) target[u32(to(lane, bit))] = {lane, bit};
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        for (u32 half = 0; half < 8; ++half) {
            const auto [row, bit] = target[u32(from(lane, half * 16))];
            const host::Coord at = host::stmatrix(lane, half % 2);
            CHECK(row == half / 2 * 8 + at.row && bit == at.col * 16, "lane %u, half %u: row %u, bit %u", lane, half, row, bit);
        }
    }
}
CASE(fragments_of_ldmatrix) {
    check_ldmatrix<cute::SM75_U32x4_LDSM_N>(false);
    check_ldmatrix<cute::SM75_U16x8_LDSM_T>(true);
}

// ---- wgmma

template <class Operation, u32 N> static void check_accumulators() {
    const typename cute::MMA_Traits<Operation>::CLayout layout{};
    for (u32 t = 0; t < 128; ++t) {
        for (u32 i = 0; i < N / 2; ++i) {
            const host::Coord at = host::wgmma_d(t, i);
            CHECK(u32(layout(t, i)) == at.row + 64 * at.col, "of %u, thread %u, accumulator %u", N, t, i);
        }
    }
}
CASE(accumulators_of_wgmma) {
    using namespace cute::SM90::GMMA;
    check_accumulators<MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>, 64>();
    check_accumulators<MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>, 128>();
    check_accumulators<MMA_64x256x16_F32F16F16_SS<Major::K, Major::K>, 256>();
}

CASE(swizzle) {
    // The layout that CuTe's TMA descriptors pair with CU_TENSOR_MAP_SWIZZLE_128B.
    const cute::Swizzle<3, 4, 3> swizzle;
    for (u32 at = 0; at < BUFFER_BYTES; at += 2) CHECK(u32(swizzle(at)) == host::swizzled_128b(at), "%u", at);
}

// `rows` x `k` of an operand in CuTe's layout, panels contiguous along K (`ALONG_K`) or along rows.
template <bool MN_MAJOR, int ROWS, int K, bool ALONG_K> static auto cute_layout() {
    using Order = std::conditional_t<ALONG_K, cute::Step<cute::_2, cute::_1>, cute::Step<cute::_1, cute::_2>>;
    using Shape = cute::Shape<cute::Int<ROWS>, cute::Int<K>>;
    if constexpr (MN_MAJOR) return cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{}, Shape{}, Order{});
    else return cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{}, Shape{}, Order{});
}
template <class Layout> static auto tensor_at(u32 at, Layout layout) {
    return cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Element*>(buffer + at)), layout);
}
template <class Tensor> static u32 address_of(Tensor& tensor, int r, int k) {
    return u32(reinterpret_cast<char*>(&tensor(r, k)) - buffer);
}

// Reads CuTe's descriptors with the emulated wgmma: every element must be where CuTe put it.
template <bool MN_MAJOR, int ROWS, int K, bool ALONG_K> static void check_reading() {
    constexpr Major MAJOR = MN_MAJOR ? Major::MN : Major::K;
    auto tensor = tensor_at(0xc000, cute_layout<MN_MAJOR, ROWS, K, ALONG_K>());
    auto tiles = cute::flat_divide(tensor, cute::Shape<cute::Int<ROWS>, cute::_16>{});
    for (int k16 = 0; k16 < K / 16; ++k16) {
        const u64 descriptor = cute::SM90::GMMA::make_gmma_desc<MAJOR>(tiles(cute::_, cute::_, 0, k16)).desc_;
        for (int r = 0; r < ROWS; ++r) {
            for (int k = 0; k < 16; ++k) {
                const u32 want = address_of(tensor, r, 16 * k16 + k), got = host::wgmma_operand(descriptor, u32(r), u32(k), MN_MAJOR);
                CHECK(got == want, "%s, %d x %d, row %d, k %d: %x, CuTe %x", MN_MAJOR ? "MN" : "K", ROWS, K, r, 16 * k16 + k, got, want);
            }
        }
    }
}
CASE(descriptors_match_cute) {
    check_reading<false, 64, 64, false>(), check_reading<false, 128, 64, false>(), check_reading<false, 256, 64, true>();
    check_reading<false, 64, 128, false>(), check_reading<false, 128, 128, true>();
    check_reading<true, 64, 64, false>(), check_reading<true, 128, 64, false>(), check_reading<true, 256, 64, true>();
    check_reading<true, 128, 128, false>(), check_reading<true, 256, 32, true>();
}

// ---- the Hopper kernels' stages

// The stage of the wider tile. The narrower tile's B is the first half of the wider tile's.
using Stage = hopper::Tile<256>;

// Offset of element (row or column `r`, `k`) of an operand in a stage, from its first panel.
template <bool MN_MAJOR> static u32 stage_offset(u32 r, u32 k) {
    const u32 line = MN_MAJOR ? k : r % hopper::PANEL, along = MN_MAJOR ? r % hopper::PANEL : k;
    return r / hopper::PANEL * hopper::PANEL_BYTES + hopper::swizzled(line, along / 8) + along % 8 * 2;
}
template <bool MN_MAJOR, int ROWS> static void check_stage() {
    // Panels follow each other along rows, and each has all steps of K. An MN-major atom of CuTe has only 8 steps of K, so CuTe must repeat
    // it along K first.
    auto tensor = tensor_at(Stage::STAGE_BYTES, cute_layout<MN_MAJOR, ROWS, hopper::TILE_K, MN_MAJOR>());
    for (u32 r = 0; r < ROWS; ++r) {
        for (u32 k = 0; k < hopper::TILE_K; ++k) {
            const u32 got = Stage::STAGE_BYTES + stage_offset<MN_MAJOR>(r, k), want = address_of(tensor, int(r), int(k));
            CHECK(got == want, "%s, %d rows, row %u, k %u: %x, CuTe %x", MN_MAJOR ? "MN" : "K", ROWS, r, k, got, want);
        }
    }
}
CASE(stages) {
    check_stage<false, hopper::TILE_M>(), check_stage<false, Stage::N>();
    check_stage<true, hopper::TILE_M>(), check_stage<true, Stage::N>();
}

// The kernels' descriptors of a stage, for both warpgroups and all steps of K: A's, then B's.
template <bool A_MN_MAJOR, bool B_MN_MAJOR> DEVICE void describe(u64* out) {
    const u32 group = dev::thread() / 4, k16 = dev::thread() % 4;
    if (group > 1) return;
    const u64 a = hopper::descriptor<A_MN_MAJOR>(dev::shared() + group * hopper::PANEL_BYTES);
    const u64 b = hopper::descriptor<B_MN_MAJOR>(dev::shared() + hopper::A_BYTES);
    out[dev::thread()] = hopper::descriptor_at<A_MN_MAJOR>(a, Stage::STAGE_BYTES, k16);
    out[8 + dev::thread()] = hopper::descriptor_at<B_MN_MAJOR>(b, Stage::STAGE_BYTES, k16);
}
extern "C" {
KERNEL(test_describe_k_k, 32, 1)(u64* out) { describe<false, false>(out); }
KERNEL(test_describe_k_mn, 32, 1)(u64* out) { describe<false, true>(out); }
KERNEL(test_describe_mn_mn, 32, 1)(u64* out) { describe<true, true>(out); }
}
namespace dev {
REGISTER_KERNEL(test_describe_k_k)
REGISTER_KERNEL(test_describe_k_mn)
REGISTER_KERNEL(test_describe_mn_mn)
}  // namespace dev

template <bool A_MN_MAJOR, bool B_MN_MAJOR> static void check_descriptors(const char* kernel) {
    constexpr Major A = A_MN_MAJOR ? Major::MN : Major::K, B = B_MN_MAJOR ? Major::MN : Major::K;
    using Operation = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<A, B>;
    // Dynamic shared memory begins at 1024.
    const u32 stage = 1024 + Stage::STAGE_BYTES;
    auto mma = cute::make_tiled_mma(Operation{}, cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{});
    auto a = tensor_at(stage, cute_layout<A_MN_MAJOR, hopper::TILE_M, hopper::TILE_K, A_MN_MAJOR>());
    auto b = tensor_at(stage + hopper::A_BYTES, cute_layout<B_MN_MAJOR, Stage::N, hopper::TILE_K, B_MN_MAJOR>());
    testing::World world;
    u64* ours = world.heap<u64>(0);
    world.launch(0, kernel, 1, 32, 2 * Stage::STAGE_BYTES, ours);
    // The leading offset is unused in K-major operands, and in MN-major ones of a single panel, such as a warpgroup's rows of A.
    const u64 leading = 0x3fffull << 16;
    for (u32 group = 0; group < 2; ++group) {
        auto slice = mma.get_slice(int(group) * 128);
        auto of_a = slice.make_fragment_A(slice.partition_A(a));
        auto of_b = slice.make_fragment_B(slice.partition_B(b));
        for (u32 k16 = 0; k16 < 4; ++k16) {
            const u64 want_a = (*of_a(cute::_, 0, int(k16)).data()).desc_, want_b = (*of_b(cute::_, 0, int(k16)).data()).desc_;
            const u64 got_a = ours[group * 4 + k16], got_b = ours[8 + group * 4 + k16];
            CHECK(((got_a ^ want_a) & ~leading) == 0, "A of warpgroup %u, step %u: %llx, CuTe %llx", group, k16,
                  static_cast<unsigned long long>(got_a), static_cast<unsigned long long>(want_a));
            CHECK(((got_b ^ want_b) & (B_MN_MAJOR ? ~0ull : ~leading)) == 0, "B, step %u: %llx, CuTe %llx", k16,
                  static_cast<unsigned long long>(got_b), static_cast<unsigned long long>(want_b));
        }
    }
}
CASE(descriptors_of_a_stage) {
    check_descriptors<false, false>("test_describe_k_k");  // forward
    check_descriptors<false, true>("test_describe_k_mn");  // backward
    check_descriptors<true, true>("test_describe_mn_mn");  // weight gradients
}

// Descriptor bits as packed by the GPU's header and by CuTe.
CASE(descriptor_bits) {
    for (u32 at = 0; at < 227 * 1024; at += 16 * 37) {
        for (u32 bytes = 16; bytes < 1 << 17; bytes *= 2) {
            cute::GmmaDescriptor want{};
            want.bitfield.start_address_ = u16(at >> 4);
            want.bitfield.leading_byte_offset_ = u16(bytes >> 4);
            want.bitfield.stride_byte_offset_ = u16((bytes + 1024) >> 4);
            want.bitfield.layout_type_ = u8(cute::SM90::GMMA::LayoutType::B128);
            const u64 got = gpu::dev::smem_descriptor(buffer + at, bytes, bytes + 1024);
            CHECK(got == want.desc_, "%llx, CuTe %llx", static_cast<unsigned long long>(got), static_cast<unsigned long long>(want.desc_));
        }
    }
}

}  // namespace aristos

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
