// aristos_route, aristos_route_backward and aristos_router_gradients against float64 and against differences of the loss. The test also
// runs under ThreadSanitizer.
#include <algorithm>

#include "../route.h"
#include "../router_gradients.h"
#include "../plan.h"
#include "route_world.h"

using namespace world;

namespace {

double worst_logit = 0, worst_weight = 0, worst_d_logit = 0, worst_router = 0, worst_input = 0;

struct Case {
    u32 tokens, experts, k, hidden = 64, dtype = DTYPE_BF16, parts = 3;
    u32 scoring = SCORING_SOFTMAX, renormalise = 0, bias = 0, groups = 0, top_groups = 0;
    float scaling = 1.0f, aux = 0.0f, z = 0.0f;
    u32 gate = 0;
    u32 ties = 0;    // experts 2 i and 2 i + 1 have equal weights
    float d_size = 1.0f;  // scale of the routing weights' gradients
    u32 blocks = 4;
};

std::vector<double> scores_of(const Case& c, const double* logits) {
    std::vector<double> s(c.experts);
    double max = -INFINITY, sum = 0;
    for (u32 e = 0; e < c.experts; e++) max = std::max(max, logits[e]);
    for (u32 e = 0; e < c.experts; e++) sum += std::exp(logits[e] - max);
    for (u32 e = 0; e < c.experts; e++)
        s[e] = c.scoring == SCORING_SOFTMAX ? std::exp(logits[e] - max) / sum : 1 / (1 + std::exp(-logits[e]));
    return s;
}
double lse_of(const Case& c, const double* logits) {
    double sum = 0, max = *std::max_element(logits, logits + c.experts);
    for (u32 e = 0; e < c.experts; e++) sum += std::exp(logits[e] - max);
    return max + std::log(sum);
}
std::vector<double> weights_of(const Case& c, const std::vector<double>& scores, const u32* chosen) {
    std::vector<double> w(c.k);
    double sum = 0;
    for (u32 j = 0; j < c.k; j++) sum += w[j] = scores[chosen[j]];
    if (!c.renormalise) sum = 1;
    else if (c.scoring == SCORING_SIGMOID) sum += 1e-20;
    for (double& v : w) v *= c.scaling / sum;
    return w;
}

// Chooses by sorting. `gap`: the smallest difference between a chosen and a rejected value.
std::vector<u32> choose(const Case& c, const std::vector<double>& scores, const std::vector<float>& bias, double& gap) {
    std::vector<double> selection = scores;
    if (c.bias) for (u32 e = 0; e < c.experts; e++) selection[e] += bias[e];
    gap = INFINITY;
    auto best = [&](const std::vector<double>& of, u32 count) {
        std::vector<u32> order(of.size());
        for (u32 i = 0; i < order.size(); i++) order[i] = i;
        std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return of[a] > of[b]; });
        // An exact tie is not a close decision: the smaller index wins.
        if (count < order.size() && of[order[count - 1]] != of[order[count]])
            gap = std::min(gap, of[order[count - 1]] - of[order[count]]);
        order.resize(count);
        return order;
    };
    if (c.groups) {
        const u32 size = c.experts / c.groups;
        std::vector<double> of(c.groups);
        for (u32 g = 0; g < c.groups; g++) {
            std::vector<double> in(selection.begin() + g * size, selection.begin() + (g + 1) * size);
            std::sort(in.rbegin(), in.rend());
            of[g] = in[0] + (size > 1 ? in[1] : 0);
        }
        const auto groups = best(of, c.top_groups);
        for (u32 e = 0; e < c.experts; e++)
            if (std::find(groups.begin(), groups.end(), e / size) == groups.end()) selection[e] = -INFINITY;
    }
    auto chosen = best(selection, c.k);
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

// The function whose gradients the kernels compute, for one token: <routing weights, d_weights> plus both losses.
double objective(const Case& c, const double* logits, const u32* chosen, const float* dw, const std::vector<double>& routed,
                 double all_tokens) {
    const auto scores = scores_of(c, logits);
    const auto w = weights_of(c, scores, chosen);
    double loss = 0;
    for (u32 j = 0; j < c.k; j++) loss += double(dw[j]) * w[j];
    double norm = 0;
    for (double s : scores) norm += s;
    for (u32 e = 0; e < c.experts; e++) loss += c.aux * c.experts * routed[e] / all_tokens * scores[e] / norm / all_tokens;
    const double lse = lse_of(c, logits);
    return loss + c.z * lse * lse / all_tokens;
}

void run(const Case& c, u32 seed) {
    context = "tokens " + std::to_string(c.tokens) + " experts " + std::to_string(c.experts) + " k " + std::to_string(c.k) + " hidden " +
              std::to_string(c.hidden) + " dtype " + std::to_string(c.dtype) + " scoring " + std::to_string(c.scoring) + " groups " +
              std::to_string(c.groups) + " seed " + std::to_string(seed);
    LayerShape s = shape();
    s.hidden = c.hidden, s.n_experts = c.experts, s.top_k = c.k, s.dtype = c.dtype, s.router_parts = c.parts;
    s.scoring = c.scoring, s.renormalise = c.renormalise, s.correction_bias = c.bias, s.n_groups = c.groups;
    s.top_groups = c.top_groups, s.scaling = c.scaling, s.aux_loss_coef = c.aux, s.z_loss_coef = c.z;
    s.shared_gate = c.gate, s.shared_intermediate = c.gate ? 8 : 0, s.blocks = c.blocks;
    s.max_tokens = c.tokens + 3;  // differs from c.tokens, so that confused strides are noticed
    World w(s, [](u32) { return 0; });
    Pe& p = *w.pes[0];
    const Layer& l = p.layer();
    const u32 h = c.hidden, experts = c.experts;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (u64 i = 0; i < u64(c.tokens) * h; i++) p.x[i] = narrow(normal(random), c.dtype);
    for (u64 i = 0; i < p.router_f32.size(); i++) p.router_f32[i] = normal(random) / std::sqrt(float(h));
    if (c.ties)
        for (u32 e = 1; e < experts; e += 2)
            std::copy_n(p.router_f32.begin() + (e - 1) * h, h, p.router_f32.begin() + e * h);
    w.set_router(p);
    for (float& b : p.bias) b = c.ties ? 0.25f : normal(random) * 0.1f;
    for (float& g : p.gate) g = normal(random) / std::sqrt(float(h));
    Pass pass = w.pass(0, 1, 1, c.tokens);
    std::memset(l.stats, 0xff, sizeof(PassStats));
    if (!w.launch(0, KERNEL_ROUTE, "aristos_route", pass)) return;
    // A second run: the bits do not depend on which block is last.
    const std::vector<float> once(l.routing.logits, l.routing.logits + u64(c.tokens) * experts);
    std::fill_n(l.routing.logits, once.size(), NAN);
    if (!w.launch(0, KERNEL_ROUTE, "aristos_route", pass)) return;
    CHECK(!std::memcmp(once.data(), l.routing.logits, once.size() * 4), "logits differ from those of the launch before");
    for (u32 i = 0; i < route_blocks(w.s); i++) CHECK(l.routing.done[i] == 0, "blocks of tokens %u: %u are left", i, l.routing.done[i]);
    if (!w.launch(0, KERNEL_PLAN, "aristos_plan", pass)) return;
    for (u64 i = 0; i < sizeof(PassStats) / 8; i++) CHECK(reinterpret_cast<u64*>(l.stats)[i] == 0, "counter %u is not cleared", u32(i));

    auto x = [&](u32 t, u32 i) { return double(widen(p.x[u64(t) * h + i], c.dtype)); };
    std::vector<double> logits(u64(c.tokens) * experts), routed(experts, 0), prob_sums(experts, 0);
    double z_sum = 0;
    for (u32 t = 0; t < c.tokens; t++) {
        for (u32 e = 0; e < experts; e++) {
            double sum = 0, size = 0;
            for (u32 i = 0; i < h; i++) {
                const double product = x(t, i) * p.router_f32[u64(e) * h + i];
                sum += product, size += std::fabs(product);
            }
            const double got = l.routing.logits[u64(t) * experts + e], error = std::fabs(got - sum) / (size + 1e-30);
            worst_logit = std::max(worst_logit, error);
            CHECK(error < 5e-7, "logit of token %u expert %u: %g instead of %g", t, e, got, sum);
            logits[u64(t) * experts + e] = got;  // continue with the kernel's logits, so that errors do not add up
        }
        const double* of = &logits[u64(t) * experts];
        const auto scores = scores_of(c, of);
        double gap;
        const auto chosen = choose(c, scores, p.bias, gap);
        const u32* got = l.routing.chosen + u64(t) * c.k;
        const bool same = std::equal(chosen.begin(), chosen.end(), got);
        CHECK(same || gap < 1e-6, "token %u: %u ... instead of %u ..., gap %g", t, got[0], chosen[0], gap);
        const auto weights = weights_of(c, scores, got);
        for (u32 j = 0; j < c.k; j++) {
            const double error = std::fabs(l.routing.routing_weights[u64(t) * c.k + j] - weights[j]) / (weights[j] + 1e-30);
            worst_weight = std::max(worst_weight, error);
            CHECK(error < 4e-6, "token %u weight %u: %g instead of %g", t, j, l.routing.routing_weights[u64(t) * c.k + j], weights[j]);
            routed[got[j]]++;
        }
        const double lse = lse_of(c, of);
        CHECK(std::fabs(l.routing.lse[t] - lse) < 1e-6 * (1 + std::fabs(lse)), "token %u: lse %g instead of %g", t, l.routing.lse[t], lse);
        z_sum += lse * lse;
        double norm = 0;
        for (double v : scores) norm += v;
        for (u32 e = 0; e < experts; e++) prob_sums[e] += scores[e] / norm;
        if (c.gate) {
            double dot = 0;
            for (u32 i = 0; i < h; i++) dot += x(t, i) * p.gate[i];
            const double expected = 1 / (1 + std::exp(-dot));
            CHECK(std::fabs(l.routing.shared_weight[t] - expected) < 1e-6, "token %u: gate %g instead of %g", t, l.routing.shared_weight[t], expected);
        }
    }
    const bool losses = c.aux != 0 || c.z != 0;
    if (losses) {
        const double* mine = l.losses.mine;
        CHECK(mine[0] == c.tokens && std::fabs(mine[1] - z_sum) <= 1e-6 * (z_sum + c.tokens), "z sum %g instead of %g", mine[1], z_sum);
        for (u32 e = 0; e < experts; e++) {
            CHECK(mine[2 + e] == routed[e], "expert %u: %g pairs", e, mine[2 + e]);
            CHECK(std::fabs(mine[2 + experts + e] - prob_sums[e]) <= 2e-6 * prob_sums[e], "expert %u: probabilities %g instead of %g", e,
                  mine[2 + experts + e], prob_sums[e]);
        }
    }

    // Backward, as if other PEs had 100 more tokens, all for expert 0.
    const double all_tokens = c.tokens + 100;
    routed[0] += 100;
    if (losses) {
        l.losses.all[0] = all_tokens;
        for (u32 e = 0; e < experts; e++) l.losses.all[2 + e] = routed[e];
    }
    for (u64 i = 0; i < u64(c.tokens) * c.k; i++) l.routing.d_weights[i] = normal(random) * c.d_size;
    for (u32 t = 0; t < c.tokens && c.gate; t++) l.routing.d_shared_weight[t] = normal(random) * c.d_size;
    std::vector<float> before(p.output.size());
    for (u64 i = 0; i < before.size(); i++) before[i] = p.output[i] = normal(random) * c.d_size;
    pass.pass = 2;
    if (!w.launch(0, KERNEL_ROUTE_BACKWARD, "aristos_route_backward", pass)) return;
    if (!w.launch(0, KERNEL_ROUTER_GRADIENTS, "aristos_router_gradients", pass)) return;
    // Checks the logits' gradients by differences in float64, independent of derivative formulas: for all tokens of a small case, otherwise
    // for some.
    double largest = 0;
    for (u64 i = 0; i < u64(c.tokens) * experts; i++) largest = std::max(largest, double(std::fabs(l.routing.d_logits[i])));
    for (u32 t = 0; t < c.tokens; t += 1 + c.tokens * experts / 4000) {
        std::vector<double> at(logits.begin() + u64(t) * experts, logits.begin() + u64(t + 1) * experts);
        const u32* chosen = l.routing.chosen + u64(t) * c.k;
        const float* dw = l.routing.d_weights + u64(t) * c.k;
        for (u32 e = 0; e < experts; e++) {
            const double step = 1e-4, middle = at[e];
            auto value = [&](double v) {
                at[e] = v;
                return objective(c, at.data(), chosen, dw, routed, all_tokens);
            };
            // A difference of fourth order.
            const double d = (8 * (value(middle + step) - value(middle - step)) - value(middle + 2 * step) + value(middle - 2 * step)) / (12 * step);
            at[e] = middle;
            const double got = l.routing.d_logits[u64(t) * experts + e], error = std::fabs(got - d) / largest;
            if (largest > 0) worst_d_logit = std::max(worst_d_logit, error);
            // The terms of the formula may cancel, so the error in f32 is proportional to the largest term.
            float term = 0;
            for (u32 j = 0; j < c.k; j++) term = std::max(term, std::fabs(dw[j]) * c.scaling);
            CHECK(std::fabs(got - d) <= 2e-6 * largest + 2e-7 * term, "token %u: gradient of logit %u is %g instead of %g", t, e, got, d);
        }
    }

    // Checks the products in float64, from the kernel's gradients of the logits.
    auto d_logit = [&](u32 t, u32 e) { return double(l.routing.d_logits[u64(t) * experts + e]); };
    auto d_gate = [&](u32 t) {
        const double v = l.routing.shared_weight[t];
        return double(l.routing.d_shared_weight[t]) * v * (1 - v);
    };
    // Three planes of f16 lose terms 2^-40 below the largest gradient of 64 tokens; bf16 planes are exact.
    double lost = largest;
    for (u32 t = 0; t < c.tokens && c.gate; t++) lost = std::max(lost, std::fabs(d_gate(t)));
    lost *= c.dtype == DTYPE_F16 ? 0x1p-38 : 0;
    for (u32 e = 0; e < experts + c.gate; e++) {
        for (u32 i = 0; i < h; i++) {
            double sum = 0, size = 0;
            for (u32 t = 0; t < c.tokens; t++) {
                const double d = e < experts ? d_logit(t, e) : d_gate(t);
                sum += d * x(t, i), size += (std::fabs(d) + lost * 1e6) * std::fabs(x(t, i));
            }
            const double got = e < experts ? p.grad_router[u64(e) * h + i] : p.grad_gate[i], error = std::fabs(got - sum);
            worst_router = std::max(worst_router, error / (size + 1e-300));
            CHECK(error <= 1e-6 * size, "gradient of router %u %u: %g instead of %g", e, i, got, sum);
        }
    }
    for (u32 t = 0; t < c.tokens; t++) {
        for (u32 i = 0; i < h; i++) {
            double sum = before[u64(t) * h + i], size = std::fabs(sum);
            for (u32 e = 0; e < experts; e++) {
                const double product = d_logit(t, e) * p.router_f32[u64(e) * h + i];
                sum += product, size += std::fabs(product) + lost * 1e6 * std::fabs(p.router_f32[u64(e) * h + i]);
            }
            if (c.gate) sum += d_gate(t) * p.gate[i], size += std::fabs(d_gate(t) * p.gate[i]);
            const double got = p.output[u64(t) * h + i], error = std::fabs(got - sum);
            worst_input = std::max(worst_input, error / (size + 1e-300));
            CHECK(error <= 1e-6 * size, "gradient of input %u %u: %g instead of %g", t, i, got, sum);
        }
    }
    for (u64 i = u64(c.tokens) * h; i < before.size(); i++) CHECK(p.output[i] == before[i], "output beyond the tokens");
}

// NaN and infinities: the kernel terminates, and every token has k different experts of this layer.
void not_numbers(u32 experts, u32 k, u32 groups, u32 scoring) {
    context = "not numbers, experts " + std::to_string(experts);
    LayerShape s = shape();
    s.n_experts = experts, s.top_k = k, s.n_groups = groups, s.top_groups = groups / 2, s.scoring = scoring, s.renormalise = 1;
    s.correction_bias = 1;
    World w(s, [](u32) { return 0; });
    Pe& p = *w.pes[0];
    const u32 tokens = 40, h = s.hidden;
    const float values[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1.0f, 1e38f};
    std::mt19937 random(experts);
    for (u32 t = 0; t < tokens; t++)
        for (u32 i = 0; i < h; i++) p.x[t * h + i] = narrow(random() % 8 ? 1.0f : values[random() % 8], s.dtype);
    for (float& v : p.router_f32) v = random() % 64 ? 0.5f : values[random() % 8];
    for (float& v : p.bias) v = random() % 4 ? 0.0f : from_bits(random() % 2 ? ~0u : 0x7fffffff);
    w.set_router(p);
    w.launch(0, KERNEL_ROUTE, "aristos_route", w.pass(0, 1, 1, tokens));
    for (u32 t = 0; t < tokens; t++) {
        const u32* chosen = p.layer().routing.chosen + t * k;
        for (u32 j = 0; j < k; j++)
            CHECK(chosen[j] < experts && (j == 0 || chosen[j - 1] < chosen[j]), "token %u: choice %u is %u", t, j, chosen[j]);
    }
}

}  // namespace

int main(int argc, char** argv) {
    bool brief = argc > 1 && !std::strcmp(argv[1], "brief");
#ifdef ARISTOS_TSAN
    brief = true;  // ThreadSanitizer keeps state for every thread that existed
#endif
    u32 seed = 1;
    // Every router, for various numbers of tokens and experts.
    for (u32 tokens : {0u, 1u, 127u, 129u, 1000u}) {
        for (u32 experts : {1u, 3u, 8u, 60u, 256u}) {
            if (tokens == 1000 && (experts == 256 || brief)) continue;
            for (u32 router = 0; router < 4; router++) {
                if ((tokens > 1 && router != seed % 4) || (brief && router != 1)) continue;
                Case c{tokens, experts, std::min(experts, 1 + seed * 5 % 8)};
                c.dtype = seed % 2, c.parts = 1 + seed % 3;
                c.scoring = router >= 2, c.renormalise = router == 1 || router == 3, c.bias = router >= 2;
                if (router == 3 && experts % 4 == 0) c.groups = 4, c.top_groups = 2, c.k = std::min(c.k, experts / 2);
                if (router >= 1) c.scaling = 2.5f, c.aux = 0.1f, c.z = 0.01f;
                c.gate = seed % 3 == 0;
                run(c, seed++);
            }
            seed++;
        }
    }
    // Few tokens, with logits computed by several blocks: tiles of experts, fewer blocks than tiles, ranges of the hidden size, and both.
    run({40, 300, 3, 64, DTYPE_BF16, 2, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0.1f, 0.01f, 1}, seed++);
    run({33, 700, 3, 32, DTYPE_BF16, 1, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0.1f, 0.01f, 1}, seed++);
    run({33, 8, 3, 776, DTYPE_F16, 3, SCORING_SIGMOID, 1, 1, 0, 0, 1.0f, 0.1f, 0.01f, 1}, seed++);
    run({5, 130, 3, 1032, DTYPE_BF16, 3, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0.1f, 0.01f, 1}, seed++);
    // f16 gradients far from 1; partial tiles and steps; several ranges of tokens; ties.
    run({130, 8, 2, 72, DTYPE_F16, 3, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0, 0, 1, 0, 1e-9f}, seed++);
    run({130, 8, 2, 200, DTYPE_F16, 2, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0, 0, 1, 0, 1e9f}, seed++);
    run({130, 8, 2, 136, DTYPE_BF16, 3, SCORING_SOFTMAX, 0, 0, 0, 0, 1.0f, 0, 0, 1, 0, 1e-20f}, seed++);
    run({900, 5, 2, 40, DTYPE_BF16, 1, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0.1f, 0, 1, 0, 1.0f, 16}, seed++);
    run({70, 64, 5, 64, DTYPE_F16, 3, SCORING_SIGMOID, 1, 0, 8, 3, 2.0f, 0.1f, 0, 1, 0, 1.0f, 16}, seed++);
    for (u32 scoring : {SCORING_SOFTMAX, SCORING_SIGMOID}) {
        run({100, 16, 3, 64, DTYPE_BF16, 3, scoring, 1, scoring, 0, 0, 1.0f, 0, 0, 0, 1}, seed++);
        run({100, 16, 3, 64, DTYPE_BF16, 3, scoring, 1, scoring, 4, 2, 1.0f, 0, 0, 0, 1}, seed++);
    }
    // Losses alone, so that no part of them is lost among larger terms.
    for (u32 scoring : {SCORING_SOFTMAX, SCORING_SIGMOID}) {
        run({50, 12, 3, 64, DTYPE_BF16, 2, scoring, 1, 0, 0, 0, 1.0f, 10.0f, 0, 0, 0, 1e-5f}, seed++);
        run({50, 12, 3, 64, DTYPE_BF16, 2, scoring, 0, 0, 0, 0, 1.0f, 0, 10.0f, 0, 0, 1e-5f}, seed++);
    }
    run({33, 300, 70, 16, DTYPE_BF16, 2, SCORING_SIGMOID, 1, 1, 0, 0, 1.0f, 0.1f, 0.01f}, seed++);
    if (!brief) run({40, 1024, 8, 32, DTYPE_BF16, 2, SCORING_SOFTMAX, 1, 0, 32, 4, 1.0f, 0.1f, 0.01f}, seed++);
    if (!brief) run({20, 4000, 64, 16, DTYPE_BF16, 1, SCORING_SIGMOID, 1, 1, 0, 0, 1.0f, 0.1f, 0.01f}, seed++);
    if (!brief) run({64, 128, 8, 2048, DTYPE_BF16, 3, SCORING_SOFTMAX, 1, 0, 0, 0, 1.0f, 0.001f, 0.001f, 1}, seed++);
    not_numbers(8, 2, 0, SCORING_SOFTMAX);
    not_numbers(64, 8, 8, SCORING_SIGMOID);
    not_numbers(40, 40, 0, SCORING_SIGMOID);
    std::printf("largest errors: logits %.1e, weights %.1e, gradients of logits %.1e, of the router %.1e, of the input %.1e\n", worst_logit,
                worst_weight, worst_d_logit, worst_router, worst_input);
    return report("route_test");
}
