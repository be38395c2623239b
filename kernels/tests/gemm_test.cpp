// The GEMM tile by mma.sync, and the activations, against float64: all kinds, element types, activations, tails.
//
//     g++ -std=c++17 -O2 -pthread kernels/tests/gemm_test.cpp kernels/host/*.cpp -o gemm_test && ./gemm_test
#include "gemm_problem.h"

#include "../gemm_test_kernels.h"
#include "../host/host.h"

using namespace aristos;
using namespace reference;

namespace {

int failures = 0;

void fail(const std::string& what) {
    std::printf("FAILED: %s\n", what.c_str());
    failures++;
}

// Runs the problem's tiles, each in a block of its own, on an emulated device that schedules by `seed`.
bool launch(Problem& problem, bool f16, u64 seed) {
    void* world = aristos_host_world(1, 4096, seed, nullptr);
    const GemmTask* tasks = problem.tasks.data();
    void* args[] = {&tasks};
    int error = !world || aristos_host_launch(world, 0, f16 ? "aristos_gemm_test_f16" : "aristos_gemm_test_bf16",
                                              u32(problem.tasks.size()), AmpereTile::THREADS, GEMM_TEST_SHARED_BYTES, args);
    if (error) fail(aristos_host_error());
    if (world) aristos_host_free(world);
    return !error;
}

void test_products() {
    struct Shape { u32 rows, hidden, intermediate; };
    // Below, at, and just above multiples of 16, 64, 128 and 256 in every dimension, each of which is M, N and K of some kind.
    const Shape shapes[] = {{1, 64, 64}, {7, 72, 136}, {128, 200, 264}, {129, 264, 128}, {200, 136, 72}, {65, 320, 200}};
    double worst[GEMM_KINDS] = {};
    u32 cases = 0;
    for (u32 kind = 0; kind < GEMM_KINDS; kind++)
        for (u32 f16 = 0; f16 < 2; f16++)
            for (u32 gated = 0; gated < 2; gated++)
                for (u32 s = 0; s < sizeof shapes / sizeof *shapes; s++) {
                    // Four shapes in a row have all activations; the flags take all values with each type.
                    Case c{kind, shapes[s].rows, shapes[s].hidden, shapes[s].intermediate, f16 != 0, gated != 0, (s + f16) % 4,
                           s % 2 == 0, s % 3 != 1, s / 2 % 2 == 0, (s + gated) % 3 != 2, s % 2};
                    Problem problem(c, AmpereTile::M, AmpereTile::N);
                    if (!launch(problem, c.f16, s + 1)) continue;
                    std::string wrong = problem.verify();
                    if (!wrong.empty()) fail(c.name() + ":" + wrong);
                    if (problem.worst() > worst[kind]) worst[kind] = problem.worst();
                    cases++;
                }
    for (u32 kind = 0; kind < GEMM_KINDS; kind++)
        std::printf("kind %u: worst error %.3f of its bound\n", kind, worst[kind]);
    std::printf("%u products\n", cases);
}

// The order in which the device runs warps and copies must not show in any bit.
void test_repeatable() {
    for (u32 kind = 0; kind < GEMM_KINDS; kind++) {
        Case c{kind, 137, 136, 328, kind % 2 != 0, true, ACT_SILU, true, true, true, true, 1};
        Problem first(c, AmpereTile::M, AmpereTile::N);
        if (!launch(first, c.f16, 1)) continue;
        std::string wrong = first.verify();
        if (!wrong.empty()) fail(c.name() + ":" + wrong);
        for (u64 seed = 2; seed < 5; seed++) {
            Problem again(c, AmpereTile::M, AmpereTile::N);
            if (launch(again, c.f16, seed) && !again.same_outputs(first)) fail(c.name() + ": other bits with another seed");
        }
    }
}

template <class Act> void test_activation(u32 activation) {
    double worst_value = 0, worst_slope = 0;
    auto check = [&](float x) {
        ValueSlope got = Act::at(x);
        Near v = value_f32(activation, x), s = slope_f32(activation, x);
        // Half of the least normal number besides: results below it may be flushed.
        double off_value = std::fabs(got.value - v.value) / (v.error + 0x1p-127);
        double off_slope = std::fabs(got.slope - s.value) / (s.error + 0x1p-127);
        if (!(off_value <= 1) || !(off_slope <= 1)) {
            char text[200];
            std::snprintf(text, sizeof text, "activation %u at %.9g: %.9g, slope %.9g, not %.9g, %.9g", activation, x, got.value, got.slope,
                          v.value, s.value);
            fail(text);
        }
        worst_value = std::fmax(worst_value, off_value), worst_slope = std::fmax(worst_slope, off_slope);
    };
    for (int i = -200000; i <= 200000; i++) check(float(i) * 1e-4f);
    for (float x = 1e-30f; x < 1e30f; x *= 1.7f) check(x), check(-x);
    check(0.0f), check(-0.0f);
    const float inf = INFINITY;
    if (!std::isnan(Act::at(NAN).value)) fail("NaN must give NaN");
    if (Act::at(inf).value != inf || Act::at(inf).slope != 1.0f) fail("infinity must give infinity");
    ValueSlope low = Act::at(-inf);
    if (!(std::fabs(low.value) < 1e-34f && std::fabs(low.slope) < 1e-34f)) fail("minus infinity must give 0");
    std::printf("activation %u: worst error %.3f of its bound, slope %.3f\n", activation, worst_value, worst_slope);
}

}  // namespace

int main() {
    test_activation<Silu>(ACT_SILU);
    test_activation<Gelu>(ACT_GELU);
    test_activation<GeluTanh>(ACT_GELU_TANH);
    test_activation<Relu>(ACT_RELU);
    test_repeatable();
    test_products();
    if (failures) std::printf("%d failures\n", failures);
    else std::printf("ok\n");
    return failures != 0;
}
