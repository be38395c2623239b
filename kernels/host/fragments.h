// Element layouts: in the registers of mma, ldmatrix and wgmma, and in shared memory as TMA writes and wgmma reads it. The layouts follow
// the named sections of the PTX ISA; kernels/tests/cute_layouts.cpp compares all of them with CuTe.
#pragma once
#include "../params.h"

namespace aristos::host {

struct Coord {
    u32 row, col;
};

// ---- mma.m16n8k16 ("Matrix Fragments for mma.m16n8k16 with floating point type"): element `half` of register `i` of a lane.

inline Coord mma_a(u32 lane, u32 i, u32 half) { return {lane / 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i / 2) + half}; }  // (m, k)
inline Coord mma_b(u32 lane, u32 i, u32 half) { return {2 * (lane % 4) + 8 * i + half, lane / 4}; }                        // (k, n)
inline Coord mma_d(u32 lane, u32 i) { return {lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2}; }                           // (m, n)

// ---- ldmatrix ("Warp-level matrix load instruction"): element `half` of a lane's register, for each 8 x 8 matrix.

inline Coord ldmatrix(u32 lane, u32 half, bool transposed) {
    const u32 along = 2 * (lane % 4) + half;
    return transposed ? Coord{along, lane / 4} : Coord{lane / 4, along};
}

// ---- stmatrix ("Matrix store instruction"): element `half` of a lane's register, for each 8 x 8 matrix.

inline Coord stmatrix(u32 lane, u32 half) { return {lane / 4, 2 * (lane % 4) + half}; }

// ---- The 128-byte swizzle: address bits 4 to 6 are XORed with bits 7 to 9 ("Shared Memory Matrix Layout", "Tensor swizzling modes").

inline u32 swizzled_128b(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// ---- wgmma

// Accumulator `i` of thread `t` of a warpgroup ("Register Fragments for wgmma.mma_async", D).
inline Coord wgmma_d(u32 t, u32 i) { return {16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (t % 4) + i % 2}; }

// Address of element (row or column `r`, `k`) of an operand of 16-bit elements with 128-byte swizzle; `trans`: MN-major ("Shared Memory
// Matrix Layout", "Strides", "Matrix Descriptor Format").
inline u32 wgmma_operand(u64 descriptor, u32 r, u32 k, bool trans) {
    const u32 start = u32(descriptor & 0x3fff) << 4;
    const u32 lbo = u32(descriptor >> 16 & 0x3fff) << 4;
    const u32 sbo = u32(descriptor >> 32 & 0x3fff) << 4;
    return swizzled_128b(trans ? start + r / 64 * lbo + k / 8 * sbo + k % 8 * 128 + r % 64 * 2
                               : start + r / 8 * sbo + r % 8 * 128 + k * 2);
}

}  // namespace aristos::host
