// The Hopper GEMM path on the emulator: queues of tiles of several experts, forward and then backward, against float64.
//
// Experts have 1, 7, 64, 129 and 200 slots; K, M and N end within a box of 64 elements, or 16 bytes before or after the end of one. Rows
// between batches hold NaN, as does everything that no row pointer may reach; all writes must lie within their arrays. A queue must give
// the same bytes on any number of blocks, for any emulator seed, and with tasks that become known late.
//
// Tiles are 128 x 256 and 128 x 128. Prefetches must cover exactly the lines of gate_up and of the sums that backward's epilogues read.
#include <limits>
#include <mutex>
#include <set>

#include "../gemm_hopper_test_kernels.h"
#include "gemm_reference.h"
#include "testing.h"

namespace {

using namespace aristos;
using reference::Near;

void fail(const std::string& what) { CHECK(false, "%s", what.c_str()); }

// For a matrix of `columns` columns with row pitch `pitch`.
template <class T> TensorMap tensor_map(const T* first, u32 rows, u32 columns, u32 pitch, u32 box_rows) {
    TensorMap map;
    u64 base = reinterpret_cast<u64>(first), stride = u64(pitch) * sizeof(T);
    if (aristos_host_tensor_map(&map, base, rows, columns, stride, box_rows, hopper::PANEL, sizeof(T)) != 0) {
        fail(std::string("tensor map: ") + aristos_host_error());
    }
    return map;
}

// For the weights of all experts: consecutive matrices without gaps.
template <class T> TensorMap weight_map(const T* first, u32 experts, u32 rows, u32 columns) {
    TensorMap map;
    const u64 row_bytes = u64(columns) * sizeof(T);
    if (aristos_host_tensor_map_3d(&map, reinterpret_cast<u64>(first), rows, columns, row_bytes, experts, rows * row_bytes, hopper::PANEL, hopper::PANEL, sizeof(T)) != 0) {
        fail(std::string("tensor map: ") + aristos_host_error());
    }
    return map;
}

// An array between two guard zones, 16-byte aligned, initially all bytes PATTERN.
constexpr unsigned char PATTERN = 0x5a;
template <class E> class Guarded {
    static constexpr size_t GUARD = 256;
    struct alignas(256) Block { unsigned char bytes[256]; };
    std::vector<Block> memory_;
    size_t count_;

public:
    explicit Guarded(size_t count) : memory_((2 * GUARD + count * sizeof(E)) / 256 + 1), count_(count) {
        std::memset(memory_.data(), PATTERN, memory_.size() * 256);
    }
    E* data() { return reinterpret_cast<E*>(memory_[0].bytes + GUARD); }
    const E* data() const { return reinterpret_cast<const E*>(memory_[0].bytes + GUARD); }
    E& operator[](size_t i) { return data()[i]; }
    const E& operator[](size_t i) const { return data()[i]; }
    size_t size() const { return count_; }
    bool untouched(size_t first, size_t end) const {
        auto* bytes = reinterpret_cast<const unsigned char*>(data());
        for (size_t i = first * sizeof(E); i < end * sizeof(E); i++)
            if (bytes[i] != PATTERN) return false;
        return true;
    }
    void check_guards(const std::string& what) const {
        const unsigned char* bytes = memory_[0].bytes;
        size_t used = GUARD + count_ * sizeof(E), end = memory_.size() * 256;
        for (size_t i = 0; i < end; i == GUARD - 1 ? i = used : i++)
            if (bytes[i] != PATTERN) return fail(what + ": written outside the array");
    }
};

struct Shape {
    u32 hidden, intermediate;
    bool gated, bias, weighted, training, accumulate;
    u32 activation;
    std::vector<u32> rows;  // per expert
    bool stored = true;     // results stored by TMA if a warp has all its rows
    bool pair = false;      // computed by CTA pairs
};

// Prefetched 128-byte lines.
std::mutex prefetched_mutex;
std::set<u64> prefetched;
void note_prefetch(const void* p) {
    std::lock_guard lock(prefetched_mutex);
    prefetched.insert(reinterpret_cast<u64>(p) / 128);
}

constexpr u32 GAP = 3;  // rows between two batches
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

template <class T> struct Run {
    Shape shape;
    u32 tile_n;
    u32 H, I, W;  // W: width of gate_up
    u32 experts, slots = 0, tokens = 0;
    std::vector<u32> first;  // first slot of each expert
    Guarded<T> x, dy, gate, up, down, gate_up, h, y, dx;
    Guarded<float> gate_bias, up_bias, down_bias, weight, d_weight, d_gate, d_up, d_down;
    std::vector<T> poison;                   // a row that no batch's pointer may reach
    std::vector<const void*> x_row, dy_row;  // by slot
    TensorMap maps[WEIGHT_MAPS];  // of the weights of all experts
    std::vector<TensorMap> slot_maps;  // with y, then with dx
    u32 d_weight_stride;

    static u32 slots_of(const Shape& s) {
        u32 n = 0;
        for (u32 r : s.rows) n += r + GAP;
        return n;
    }

    Run(const Shape& s, u32 n, u32 seed)
        : shape(s), tile_n(n), H(s.hidden), I(s.intermediate), W(s.gated ? 2 * I : I), experts(u32(s.rows.size())), slots(slots_of(s)),
          tokens(slots / 2 + 1), x(size_t(tokens) * H), dy(size_t(tokens) * H), gate(size_t(experts) * I * H),
          up(size_t(experts) * I * H), down(size_t(experts) * H * I), gate_up(size_t(slots) * W), h(size_t(slots) * I),
          y(size_t(slots) * H), dx(size_t(slots) * H), gate_bias(size_t(experts) * I), up_bias(size_t(experts) * I),
          down_bias(size_t(experts) * H), weight(slots), d_weight(size_t(slots) * (tiles() + 1)),
          d_gate(size_t(experts) * I * H), d_up(size_t(experts) * I * H), d_down(size_t(experts) * H * I), poison(H),
          d_weight_stride(tiles() + 1) {
        std::mt19937 random(seed);
        std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
        float in = 1.0f / std::sqrt(float(H) / 3), back = 1.0f / std::sqrt(float(I) / 3);
        for (size_t i = 0; i < x.size(); i++) x[i] = dev::from_float<T>(uniform(random));
        for (size_t i = 0; i < dy.size(); i++) dy[i] = dev::from_float<T>(uniform(random));
        for (size_t i = 0; i < gate.size(); i++) gate[i] = dev::from_float<T>(uniform(random) * 2 * in);
        for (size_t i = 0; i < up.size(); i++) up[i] = dev::from_float<T>(uniform(random) * 2 * in);
        for (size_t i = 0; i < down.size(); i++) down[i] = dev::from_float<T>(uniform(random) * back);
        for (size_t i = 0; i < gate_bias.size(); i++) gate_bias[i] = uniform(random);
        for (size_t i = 0; i < up_bias.size(); i++) up_bias[i] = uniform(random);
        for (size_t i = 0; i < down_bias.size(); i++) down_bias[i] = uniform(random);
        for (size_t i = 0; i < weight.size(); i++) weight[i] = uniform(random);
        if (shape.accumulate) {
            for (auto* g : {&d_gate, &d_up, &d_down})
                for (size_t i = 0; i < g->size(); i++) (*g)[i] = uniform(random);
        }
        for (T& v : poison) v = dev::from_float<T>(NOT_A_NUMBER);
        x_row.assign(slots, poison.data());
        dy_row.assign(slots, poison.data());
        u32 slot = 0;
        for (u32 e = 0; e < experts; e++) {
            first.push_back(slot);
            for (u32 r = 0; r < shape.rows[e]; r++) {
                u32 token = random() % tokens;
                x_row[slot + r] = &x[size_t(token) * H];
                dy_row[slot + r] = &dy[size_t(token) * H];
            }
            slot += shape.rows[e] + GAP;
            for (u32 r = slot - GAP; r < slot; r++) {
                for (u32 i = 0; i < W; i++) gate_up[size_t(r) * W + i] = poison[0];
                for (u32 i = 0; i < I; i++) h[size_t(r) * I + i] = poison[0];
                weight[r] = NOT_A_NUMBER;
            }
        }
        maps[0] = weight_map(gate.data(), experts, I, H);
        maps[1] = weight_map(up.data(), experts, I, H);
        maps[2] = weight_map(down.data(), experts, H, I);
        for (Guarded<T>* out : {&y, &dx}) {
            for (u32 rows : {RESULT_BOX_ROWS, OPERAND_BOX_ROWS}) {
                slot_maps.push_back(tensor_map(gate_up.data(), slots, I, W, rows));
                slot_maps.push_back(tensor_map(gate_up.data() + W - I, slots, I, W, rows));
                slot_maps.push_back(tensor_map(h.data(), slots, I, I, rows));
                if (rows == RESULT_BOX_ROWS) slot_maps.push_back(tensor_map(out->data(), slots, H, H, rows));
            }
        }
    }

    u32 tiles() const { return (I + tile_n - 1) / tile_n; }  // across I

    GemmTask task(u32 kind, u32 e, u32 m0, u32 n0, u32 which) {
        GemmTask t;
        std::memset(&t, 0xff, sizeof t);  // unused fields of a kind are undefined
        size_t slot = first[e], in = size_t(e) * I * H;
        t.kind = kind;
        t.rows = shape.rows[e];
        t.m0 = m0;
        t.n0 = n0;
        t.hidden = H;
        t.intermediate = I;
        t.gated = shape.gated;
        t.activation = u8(shape.activation);
        t.training = shape.training;
        t.accumulate = shape.accumulate;
        t.which = u8(which);
        bool of_dy = kind == BACKWARD_DOWN || kind == GRAD_DOWN;
        t.row = (of_dy ? dy_row : x_row).data() + slot;
        t.gate_up = &gate_up[slot * W];
        t.h = &h[slot * I];
        t.y = kind == BACKWARD_UP ? &dx[slot * H] : &y[slot * H];
        t.gate = t.up = t.down = nullptr;  // loaded by TMA
        t.gate_bias = shape.bias && shape.gated ? &gate_bias[size_t(e) * I] : nullptr;
        t.up_bias = shape.bias ? &up_bias[size_t(e) * I] : nullptr;
        t.down_bias = shape.bias ? &down_bias[size_t(e) * H] : nullptr;
        t.weight = shape.weighted ? &weight[slot] : nullptr;
        t.d_weight = shape.weighted ? &d_weight[slot * d_weight_stride] : nullptr;
        t.d_weight_stride = d_weight_stride;
        t.out = kind == GRAD_DOWN ? &d_down[in] : which == 0 && shape.gated ? &d_gate[in] : &d_up[in];
        t.tensor_maps = maps;
        t.expert = e;
        t.slot_maps = shape.stored ? &slot_maps[kind == BACKWARD_UP ? u32(SLOT_MAPS) : 0] : nullptr;
        t.first_slot = u32(slot);
        return t;
    }

    // Runs all tiles of the given list of (kind, which) as one queue, on a grid of `blocks`. The tiles of an entry need all tiles of the
    // entries before it.
    void launch(const std::vector<std::pair<u32, u32>>& kinds, u32 blocks, u32 seed, u32 delay) {
        std::vector<GemmTask> tasks;
        std::vector<u32> needs;
        u32 tiles = 0;
        const u32 step = shape.pair ? 2 * hopper::TILE_M : hopper::TILE_M;
        for (auto [kind, which] : kinds) {
            const u32 before = tiles;
            for (u32 e = 0; e < experts; e++) {
                GemmTask any = task(kind, e, 0, 0, which);
                u32 columns = tile_columns(kind, shape.gated, tile_n);
                for (u32 n = 0; n < gemm_n(any); n += columns) {
                    for (u32 m = 0; m < gemm_m(any); m += step) tasks.push_back(task(kind, e, m, n, which));
                    tiles += (gemm_m(any) + step - 1) / step;
                }
            }
            needs.resize(tasks.size(), before);
        }
        u32 state[3] = {0, 0, 0};
        HopperQueue queue{tasks.data(), needs.data(), u32(tasks.size()), delay, state, state + 1, state + 2, 20'000'000'000};
        const std::string of = (shape.pair ? "cta_pair_" : "") + std::string(tile_n == 128 ? "128_" : "");
        const std::string kernel = "aristos_gemm_hopper_" + of + "test_" + (std::is_same_v<T, F16> ? "f16" : "bf16");
        u32 shared = tile_n == 128 ? hopper::Tile<128>::SHARED_BYTES : hopper::Tile<256>::SHARED_BYTES;
        if (shape.pair) shared = tile_n == 128 ? hopper::Tile<128, 2>::SHARED_BYTES : hopper::Tile<256, 2>::SHARED_BYTES, blocks *= 2;
        testing::World world(1, 4096, seed);
        world.launch(0, kernel.c_str(), blocks, hopper::THREADS, shared, static_cast<const HopperQueue*>(&queue));
        if (state[2]) fail("a task waited too long");
        if (state[1] != tiles) fail("tiles left undone, or done twice");
    }
};

template <class T> std::vector<double> widen(const Guarded<T>& a) {
    std::vector<double> out(a.size());
    for (size_t i = 0; i < out.size(); i++) {
        if constexpr (std::is_same_v<T, float>) out[i] = a[i];
        else out[i] = dev::to_float(a[i]);
    }
    return out;
}

void check(double got, Near want, const char* what, size_t slot, u32 column) {
    double error = std::fabs(got - want.value);
    if (error <= want.error) return;
    char line[160];
    std::snprintf(line, sizeof line, "%s slot or row %zu column %u: %.9g, expected %.9g +- %.3g", what, slot, column, got, want.value,
                  want.error);
    fail(line);
}

template <class T> void check_forward(const Run<T>& r) {
    const auto type = reference::Type::of(std::is_same_v<T, F16>);
    const u32 H = r.H, I = r.I, W = r.W;
    auto gate = widen(r.gate), up = widen(r.up), down = widen(r.down), h = widen(r.h), gate_up = widen(r.gate_up), y = widen(r.y);
    for (u32 e = 0; e < r.experts; e++) {
        for (size_t s = r.first[e]; s < r.first[e] + r.shape.rows[e]; s++) {
            std::vector<double> x(H);
            for (u32 k = 0; k < H; k++) x[k] = dev::to_float(static_cast<const T*>(r.x_row[s])[k]);
            for (u32 i = 0; i < I; i++) {
                size_t in = size_t(e) * I * H + size_t(i) * H;
                Near u = reference::dot({x.data(), 0, 1}, 0, {up.data() + in, 0, 1}, 0, H), g = u;
                if (r.shape.bias) u = reference::plus(u, r.up_bias[size_t(e) * I + i]);
                if (r.shape.gated) {
                    g = reference::dot({x.data(), 0, 1}, 0, {gate.data() + in, 0, 1}, 0, H);
                    if (r.shape.bias) g = reference::plus(g, r.gate_bias[size_t(e) * I + i]);
                }
                Near result = reference::value_f32(r.shape.activation, r.shape.gated ? g : u);
                if (r.shape.gated) result = reference::times(result, u);
                check(h[s * I + i], result.rounded(type), "h", s, i);
                if (!r.shape.training) continue;
                check(gate_up[s * W + i], (r.shape.gated ? g : u).rounded(type), "gate", s, i);
                if (r.shape.gated) check(gate_up[s * W + I + i], u.rounded(type), "up", s, i);
            }
            for (u32 n = 0; n < H; n++) {
                Near v = reference::dot({h.data() + s * I, 0, 1}, 0, {down.data() + size_t(e) * H * I + size_t(n) * I, 0, 1}, 0, I);
                if (r.shape.bias) v = reference::plus(v, r.down_bias[size_t(e) * H + n]);
                check(y[s * H + n], v.rounded(type), "y", s, n);
            }
        }
    }
    if (!r.shape.training && !r.gate_up.untouched(0, size_t(r.shape.rows[0]) * W)) fail("gate_up written without training");
}

// `before`: gate_up after forward. `old`: the gradients before backward. r.gate_up and r.h are backward's results.
template <class T> void check_backward(const Run<T>& r, const std::vector<double>& before, const std::vector<std::vector<float>>& old) {
    const auto type = reference::Type::of(std::is_same_v<T, F16>);
    const u32 H = r.H, I = r.I, W = r.W;
    auto gate = widen(r.gate), up = widen(r.up), down = widen(r.down), h = widen(r.h), gate_up = widen(r.gate_up), dx = widen(r.dx);
    std::vector<double> x(size_t(r.slots) * H), dy(size_t(r.slots) * H);
    for (u32 e = 0; e < r.experts; e++)
        for (size_t s = r.first[e]; s < r.first[e] + r.shape.rows[e]; s++)
            for (u32 k = 0; k < H; k++) {
                x[s * H + k] = dev::to_float(static_cast<const T*>(r.x_row[s])[k]);
                dy[s * H + k] = dev::to_float(static_cast<const T*>(r.dy_row[s])[k]);
            }
    for (u32 e = 0; e < r.experts; e++) {
        size_t in = size_t(e) * I * H;
        for (size_t s = r.first[e]; s < r.first[e] + r.shape.rows[e]; s++) {
            Near w = reference::exact(r.shape.weighted ? r.weight[s] : 1.0);
            std::vector<Near> sums(r.tiles());
            std::vector<double> sizes(sums.size());
            for (u32 i = 0; i < I; i++) {
                Near q = reference::dot({dy.data() + s * H, 0, 1}, 0, {down.data() + in + i, 0, I}, 0, H);
                Near dh = reference::times(w, q);
                Near value = reference::value_f32(r.shape.activation, before[s * W + i]);
                Near slope = reference::slope_f32(r.shape.activation, before[s * W + i]);
                Near d_g = reference::times(dh, slope), result = value;
                if (r.shape.gated) {
                    Near u = reference::exact(before[s * W + I + i]);
                    d_g = reference::times(d_g, u);
                    result = reference::times(result, u);
                    check(gate_up[s * W + I + i], reference::times(dh, value).rounded(type), "d_up", s, i);
                }
                check(gate_up[s * W + i], d_g.rounded(type), "d_gate", s, i);
                check(h[s * I + i], reference::times(w, result).rounded(type), "w h", s, i);
                Near product = reference::times(q, result);
                sums[i / r.tile_n].value += product.value;
                sums[i / r.tile_n].error += product.error;
                sizes[i / r.tile_n] += std::fabs(product.value) + product.error;
            }
            for (u32 tile = 0; tile < sums.size() && r.shape.weighted; tile++) {
                sums[tile].error += 260 * reference::U * sizes[tile];
                check(r.d_weight[s * r.d_weight_stride + tile], sums[tile], "d_weight", s, tile);
            }
            for (u32 n = 0; n < H; n++) {
                Near v = reference::dot({gate_up.data() + s * W, 0, 1}, 0, {(r.shape.gated ? gate : up).data() + in + n, 0, H}, 0, I);
                if (r.shape.gated) {
                    Near second = reference::dot({gate_up.data() + s * W + I, 0, 1}, 0, {up.data() + in + n, 0, H}, 0, I);
                    v.value += second.value;
                    v.error = 2 * (v.error + second.error) + 4 * reference::U * (std::fabs(v.value) + std::fabs(second.value));
                }
                check(dx[s * H + n], v.rounded(type), "dx", s, n);
            }
        }
        size_t slot = r.first[e], rows = r.shape.rows[e];
        auto gradient = [&](const Guarded<float>& out, size_t which, reference::View a, reference::View b, u32 m, u32 n,
                            const char* what) {
            for (u32 i = 0; i < m; i++)
                for (u32 j = 0; j < n; j++) {
                    Near v = reference::dot(a, i, b, j, rows);
                    size_t at = in + size_t(i) * n + j;
                    if (r.shape.accumulate) v = reference::plus(v, old[which][at]);
                    v.error += 1e-30;
                    check(out[at], v, what, i, j);
                }
        };
        if (r.shape.gated) gradient(r.d_gate, 0, {gate_up.data() + slot * W, 1, W}, {x.data() + slot * H, 1, H}, I, H, "gradient of gate");
        gradient(r.d_up, 1, {gate_up.data() + slot * W + (r.shape.gated ? I : 0), 1, W}, {x.data() + slot * H, 1, H}, I, H, "gradient of up");
        gradient(r.d_down, 2, {dy.data() + slot * H, 1, H}, {h.data() + slot * I, 1, I}, H, I, "gradient of down");
    }
}

template <class T> void check_memory(const Run<T>& r) {
    r.gate_up.check_guards("gate_up");
    r.h.check_guards("h");
    r.y.check_guards("y");
    r.dx.check_guards("dx");
    r.d_weight.check_guards("d_weight");
    r.d_gate.check_guards("gradient of gate");
    r.d_up.check_guards("gradient of up");
    r.d_down.check_guards("gradient of down");
    if (!r.shape.gated && !r.shape.accumulate && !r.d_gate.untouched(0, r.d_gate.size())) fail("gate's gradient written, not gated");
    for (u32 e = 0; e < r.experts; e++) {
        size_t end = r.first[e] + r.shape.rows[e];
        if (!r.y.untouched(end * r.H, (end + GAP) * r.H)) fail("y written beyond the batch");
        if (!r.dx.untouched(end * r.H, (end + GAP) * r.H)) fail("dx written beyond the batch");
        if (!r.d_weight.untouched(end * r.d_weight_stride, (end + GAP) * r.d_weight_stride)) fail("d_weight beyond the batch");
        for (size_t i = end * r.W; i < (end + GAP) * r.W; i++)
            if (r.gate_up[i].bits != r.poison[0].bits) fail("gate_up written beyond the batch");
        for (size_t i = end * r.I; i < (end + GAP) * r.I; i++)
            if (r.h[i].bits != r.poison[0].bits) fail("h written beyond the batch");
    }
}

// Prefetches must cover exactly the 128-byte lines that the epilogue reads: all lines of each row of gate_up (64 elements per line) and of
// each gradient row that is added to (32 elements per line).
template <class T> void check_prefetches(const Run<T>& r) {
    std::set<u64> read, begun;
    auto reads = [&](const auto* first, u32 rows, u32 width, u32 pitch) {
        const u32 size = sizeof *first;
        for (u32 row = 0; row < rows; row++) {
            const u64 at = reinterpret_cast<u64>(first + size_t(row) * pitch);
            for (u32 i = 0; i < width; i++) read.insert((at + i * size) / 128);
            for (u32 i = 0; i < width; i += 128 / size) begun.insert((at + i * size) / 128);
        }
    };
    for (u32 e = 0; e < r.experts; e++) {
        for (u32 half = 0; half < r.W / r.I; half++) reads(&r.gate_up[size_t(r.first[e]) * r.W + half * r.I], r.shape.rows[e], r.I, r.W);
        if (!r.shape.accumulate) continue;
        const size_t in = size_t(e) * r.I * r.H;
        if (r.shape.gated) reads(&r.d_gate[in], r.I, r.H, r.H);
        reads(&r.d_up[in], r.I, r.H, r.H);
        reads(&r.d_down[in], r.H, r.I, r.I);
    }
    size_t outside = 0, missed = 0;
    for (u64 line : prefetched) outside += !read.count(line);
    for (u64 line : begun) missed += !prefetched.count(line);
    CHECK(outside == 0, "%zu prefetched lines are not read", outside);
    CHECK(missed == 0, "%zu lines of %zu were not prefetched", missed, begun.size());
}

template <class E> void append(std::vector<unsigned char>& bytes, const Guarded<E>& a) {
    auto* p = reinterpret_cast<const unsigned char*>(a.data());
    bytes.insert(bytes.end(), p, p + a.size() * sizeof(E));
}

// Forward, then backward, of all experts. Returns every result byte.
template <class T> std::vector<unsigned char> run(const Shape& shape, u32 tile_n, u32 blocks, u32 seed, u32 delay, bool compare) {
    Run<T> r(shape, tile_n, 7);
    std::vector<unsigned char> bytes;
    r.launch({{FORWARD_UP, 0}, {FORWARD_DOWN, 0}}, blocks, seed, delay);
    if (compare) check_forward(r);
    append(bytes, r.gate_up);
    append(bytes, r.h);
    append(bytes, r.y);
    if (shape.training) {
        auto before = widen(r.gate_up);
        std::vector<std::vector<float>> old;
        for (auto* g : {&r.d_gate, &r.d_up, &r.d_down}) old.emplace_back(g->data(), g->data() + g->size());
        std::vector<std::pair<u32, u32>> kinds = {{BACKWARD_DOWN, 0}, {BACKWARD_UP, 0}};
        if (shape.gated) kinds.push_back({GRAD_UP, 0});
        kinds.push_back({GRAD_UP, 1});
        kinds.push_back({GRAD_DOWN, 0});
        prefetched.clear();
        dev::prefetch_hook = compare ? note_prefetch : nullptr;
        r.launch(kinds, blocks, seed + 1, delay);
        dev::prefetch_hook = nullptr;
        if (compare) check_backward(r, before, old), check_prefetches(r);
        append(bytes, r.gate_up);
        append(bytes, r.h);
        append(bytes, r.dx);
        append(bytes, r.d_weight);
        append(bytes, r.d_gate);
        append(bytes, r.d_up);
        append(bytes, r.d_down);
    }
    if (compare) check_memory(r);
    return bytes;
}

template <class T> void test(const Shape& shape, u32 tile_n = 256) {
    auto bytes = run<T>(shape, tile_n, 2, 1, 0, true);
    CHECK(run<T>(shape, tile_n, 1, 2, 0, false) == bytes, "another result on one block");
    CHECK(run<T>(shape, tile_n, 3, 3, 5, false) == bytes, "another result on three blocks, with tasks known late");
}

const std::vector<u32> ROWS = {1, 7, 64, 129, 200};
// hidden, intermediate, gated, bias, weighted, training, accumulate, activation, rows
const Shape GATED = {264, 136, true, true, true, true, true, ACT_SILU, ROWS};
const Shape PLAIN = {72, 280, false, true, true, true, false, ACT_GELU, ROWS};
const Shape SMALLEST = {8, 8, true, false, false, true, false, ACT_GELU_TANH, {3, 65}};
const Shape WHOLE_BOXES = {320, 64, true, false, true, true, false, ACT_GELU, {127, 128}};
const Shape FORWARD_ONLY = {128, 256, false, false, false, false, false, ACT_RELU, {5, 257}};
const Shape LONG = {520, 192, false, false, false, true, true, ACT_RELU, {33, 321}};

CASE(hopper_gated_bf16) { test<Bf16>(GATED); }
CASE(hopper_gated_f16) { test<F16>(GATED); }
CASE(hopper_plain_bf16) { test<Bf16>(PLAIN); }
CASE(hopper_plain_f16) { test<F16>(PLAIN); }
CASE(hopper_smallest_bf16) { test<Bf16>(SMALLEST); }
CASE(hopper_smallest_f16) { test<F16>(SMALLEST); }
CASE(hopper_whole_boxes_bf16) { test<Bf16>(WHOLE_BOXES); }
CASE(hopper_whole_boxes_f16) { test<F16>(WHOLE_BOXES); }
CASE(hopper_forward_only_bf16) { test<Bf16>(FORWARD_ONLY); }
CASE(hopper_forward_only_f16) { test<F16>(FORWARD_ONLY); }
CASE(hopper_long_bf16) { test<Bf16>(LONG); }
CASE(hopper_long_f16) { test<F16>(LONG); }
CASE(hopper_without_slot_maps_bf16) {
    Shape shape = GATED;
    const auto bytes = run<Bf16>(shape, 256, 2, 1, 0, false);
    shape.stored = false;
    CHECK(run<Bf16>(shape, 256, 2, 1, 0, false) == bytes, "another result without TMA");
}
// CTA pairs must give the same bits as single blocks; the second block's half of a tile is often empty.
template <class T> void test_cta_pair(Shape shape, u32 tile_n) {
    const auto bytes = run<T>(shape, tile_n, 2, 1, 0, false);
    shape.pair = true;
    CHECK(run<T>(shape, tile_n, 1, 2, 0, true) == bytes, "another result by a pair of blocks");
    CHECK(run<T>(shape, tile_n, 2, 3, 5, false) == bytes, "another result by two pairs, with tasks known late");
}
CASE(hopper_cta_pair_gated_bf16) { test_cta_pair<Bf16>(GATED, 256); }
CASE(hopper_cta_pair_smallest_bf16) { test_cta_pair<Bf16>(SMALLEST, 256); }
CASE(hopper_cta_pair_forward_only_bf16) { test_cta_pair<Bf16>(FORWARD_ONLY, 256); }
CASE(hopper_cta_pair_128_plain_f16) { test_cta_pair<F16>(PLAIN, 128); }
CASE(hopper_cta_pair_128_long_f16) { test_cta_pair<F16>(LONG, 128); }
CASE(hopper_128_gated_bf16) { test<Bf16>(GATED, 128); }
CASE(hopper_128_plain_f16) { test<F16>(PLAIN, 128); }
CASE(hopper_128_smallest_bf16) { test<Bf16>(SMALLEST, 128); }
CASE(hopper_128_whole_boxes_f16) { test<F16>(WHOLE_BOXES, 128); }
CASE(hopper_128_forward_only_bf16) { test<Bf16>(FORWARD_ONLY, 128); }
CASE(hopper_128_long_f16) { test<F16>(LONG, 128); }

// Other blocks read a tile's results as soon as it is reported done.
CASE(tsan_hopper_queue) { run<Bf16>({136, 264, true, true, true, true, true, ACT_SILU, {140, 5, 70}}, 256, 3, 1, 1, false); }
CASE(tsan_hopper_cta_pair_queue) { run<Bf16>({136, 264, true, true, true, true, true, ACT_SILU, {140, 5, 70}, true, true}, 256, 1, 1, 1, false); }
CASE(tsan_hopper_128_queue) { run<F16>({136, 264, true, true, true, true, true, ACT_SILU, {140, 5, 70}}, 128, 3, 1, 1, false); }

}  // namespace

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
