// A batch with everything that a GEMM kind reads and writes, in buffers with guard zones, and a check of the results against float64. For
// tests of either GEMM path: make a Problem, launch its tasks, call `verify`.
//
// Guard zones, rows that no slot points to, and everything that a kind must not read hold bytes of 0xff: NaN in each element type, and an
// invalid address in a table of pointers.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gemm_reference.h"

namespace reference {

// Bytes between guard zones; aligned to 128.
class Buffer {
public:
    void make(size_t bytes) {
        size_ = bytes;
        memory_.assign(bytes + 2 * GUARD + 128, 0xff);
    }
    u8* data() { return begin(); }
    const u8* data() const { return const_cast<Buffer*>(this)->begin(); }
    size_t size() const { return size_; }
    bool guards_intact() const {
        const u8* start = data();
        for (size_t i = 0; i < GUARD; i++)
            if (start[-1 - long(i)] != 0xff || start[size_ + i] != 0xff) return false;
        return true;
    }
    bool untouched() const {
        for (size_t i = 0; i < size_; i++)
            if (data()[i] != 0xff) return false;
        return true;
    }
    bool same(const Buffer& other) const { return size_ == other.size_ && memcmp(data(), other.data(), size_) == 0; }
    Buffer() { make(0); }
    Buffer(const Buffer& other) { *this = other; }
    Buffer& operator=(const Buffer& other) {
        make(other.size_);
        if (size_) memcpy(data(), other.data(), size_);
        return *this;
    }

private:
    static constexpr size_t GUARD = 4096;  // larger than any stray row or piece of these tests
    u8* begin() {
        auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + GUARD;
        return memory_.data() + GUARD + (128 - address % 128) % 128;
    }
    std::vector<u8> memory_;
    size_t size_ = 0;
};

struct Case {
    u32 kind, rows, hidden, intermediate;
    bool f16, gated;
    u32 activation;
    bool bias, training, accumulate, weighted;
    u32 which;

    std::string name() const {
        char text[200];
        std::snprintf(text, sizeof text, "kind %u rows %u H %u I %u %s %s act %u bias %d training %d accumulate %d weighted %d which %u",
                      kind, rows, hidden, intermediate, f16 ? "f16" : "bf16", gated ? "gated" : "plain", activation, bias, training,
                      accumulate, weighted, which);
        return text;
    }
};

class Problem {
public:
    Buffer x, row, gate_up, h, y, gate, up, down, gate_bias, up_bias, down_bias, weight, d_weight, out;
    std::vector<GemmTask> tasks;

    Problem(const Case& c, u32 tile_m, u32 tile_n) : c_(c), type_(Type::of(c.f16)), tile_n_(tile_n) {
        const size_t R = c.rows, H = c.hidden, I = c.intermediate, G = c.gated ? 2 * I : I;
        const bool gathers = c.kind != FORWARD_DOWN && c.kind != BACKWARD_UP;
        if (gathers) {
            // Rows in scattered, unordered positions; some are shared by two slots.
            size_t used = R / 2 + 1;
            x.make((2 * used + 1) * H * 2);
            for (size_t i = 0; i < used; i++) fill(x, (2 * i + 1) * H, H, 1);
            row.make(R * sizeof(void*));
            for (size_t r = 0; r < R; r++) {
                const u8* at = x.data() + (2 * (r * 5 % used) + 1) * H * 2;
                memcpy(row.data() + r * sizeof(void*), &at, sizeof at);
            }
        }
        gate_up.make(R * G * 2);
        h.make(R * I * 2);
        y.make(R * H * 2);
        if (c.kind == BACKWARD_DOWN) {
            fill(gate_up, 0, R * G, 4);
            for (size_t i = 0; i < R * G; i += 11) set(gate_up, i, 0.0);  // relu's kink
            for (size_t i = 5; i < R * G; i += 97) set(gate_up, i, i % 2 ? 60.0 : -60.0);
        }
        if (c.kind == BACKWARD_UP || c.kind == GRAD_UP) fill(gate_up, 0, R * G, 1);
        if (c.kind == FORWARD_DOWN || c.kind == GRAD_DOWN) fill(h, 0, R * I, 1);
        const bool reads_up = c.kind == FORWARD_UP || c.kind == BACKWARD_UP;
        gate.make(I * H * 2), up.make(I * H * 2), down.make(H * I * 2);
        if (reads_up && c.gated) fill(gate, 0, I * H, 0.5);
        if (reads_up) fill(up, 0, I * H, 0.5);
        if (c.kind == FORWARD_DOWN || c.kind == BACKWARD_DOWN) fill(down, 0, H * I, 0.5);
        gate_bias.make(I * 4), up_bias.make(I * 4), down_bias.make(H * 4), weight.make(R * 4);
        fill_f32(gate_bias, 1), fill_f32(up_bias, 1), fill_f32(down_bias, 1), fill_f32(weight, 1);
        const u32 across = (c.intermediate + tile_n - 1) / tile_n;
        stride_ = across + 1;
        d_weight.make(R * stride_ * 4);
        out.make(H * I * 4);
        if (c.accumulate) fill_f32(out, 1);

        GemmTask t;
        memset(&t, 0xff, sizeof t);
        t.kind = c.kind, t.rows = c.rows, t.hidden = c.hidden, t.intermediate = c.intermediate;
        t.gated = c.gated, t.activation = u8(c.activation), t.training = c.training, t.accumulate = c.accumulate;
        t.which = u8(c.which), t.d_weight_stride = stride_;
        t.row = reinterpret_cast<const void* const*>(row.data());
        t.gate_up = gate_up.data(), t.h = h.data(), t.y = y.data();
        t.gate = gate.data(), t.up = up.data(), t.down = down.data();
        t.gate_bias = c.bias ? f32(gate_bias) : nullptr;
        t.up_bias = c.bias ? f32(up_bias) : nullptr;
        t.down_bias = c.bias ? f32(down_bias) : nullptr;
        t.weight = c.weighted ? f32(weight) : nullptr;
        t.d_weight = c.weighted ? f32(d_weight) : nullptr;
        t.out = f32(out), t.tensor_maps = nullptr;
        const bool over_i = c.kind == FORWARD_UP || c.kind == BACKWARD_DOWN || c.kind == GRAD_DOWN;
        const u32 m = c.kind == GRAD_UP ? c.intermediate : c.kind == GRAD_DOWN ? c.hidden : c.rows;
        const u32 n = over_i ? c.intermediate : c.hidden;
        const u32 columns = c.kind == FORWARD_UP && c.gated ? tile_n / 2 : tile_n;
        for (t.m0 = 0; t.m0 < m; t.m0 += tile_m)
            for (t.n0 = 0; t.n0 < n; t.n0 += columns) tasks.push_back(t);
        before_ = std::vector<Buffer>{x, row, gate_up, h, y, gate, up, down, gate_bias, up_bias, down_bias, weight, d_weight, out};
    }
    Problem(const Problem&) = delete;  // its tasks point into it
    Problem& operator=(const Problem&) = delete;

    // Checks that memory which the kind must not write is unchanged and that results are close to float64. Returns a description of the
    // first error, or an empty string.
    std::string verify() {
        wrong_.clear();
        checked_ = 0;
        const bool f_up = c_.kind == FORWARD_UP, b_down = c_.kind == BACKWARD_DOWN;
        const bool writes[] = {false, false, (f_up && c_.training) || b_down, f_up || b_down, c_.kind == FORWARD_DOWN || c_.kind == BACKWARD_UP,
                               false, false, false, false, false, false, false, b_down && c_.weighted,
                               c_.kind == GRAD_UP || c_.kind == GRAD_DOWN};
        Buffer* all[] = {&x, &row, &gate_up, &h, &y, &gate, &up, &down, &gate_bias, &up_bias, &down_bias, &weight, &d_weight, &out};
        const char* names[] = {"x", "row", "gate_up", "h", "y", "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "weight", "d_weight", "out"};
        for (int i = 0; i < 14; i++) {
            if (!all[i]->guards_intact()) wrong_ += std::string(" guard of ") + names[i];
            if (!writes[i] && !all[i]->same(before_[i])) wrong_ += std::string(" wrote ") + names[i];
        }
        switch (c_.kind) {
            case FORWARD_UP: forward_up(); break;
            case FORWARD_DOWN: product_y(false); break;
            case BACKWARD_DOWN: backward_down(); break;
            case BACKWARD_UP: product_y(true); break;
            default: gradient();
        }
        if (!checked_) wrong_ += " nothing was compared";
        return wrong_;
    }

    bool same_outputs(const Problem& other) const {
        return gate_up.same(other.gate_up) && h.same(other.h) && y.same(other.y) && d_weight.same(other.d_weight) && out.same(other.out);
    }
    double worst() const { return worst_; }  // largest error as a fraction of its bound

private:
    Case c_;
    Type type_;
    u32 tile_n_, stride_ = 0;
    u64 state_ = 0x9e3779b97f4a7c15;
    std::vector<Buffer> before_;
    std::string wrong_;
    size_t checked_ = 0;
    double worst_ = 0;

    static float* f32(Buffer& b) { return reinterpret_cast<float*>(b.data()); }
    double random() {  // in (-1, 1)
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return double(i32(state_ >> 32)) / 2147483648.0;
    }
    // Conversions that do not depend on the kernels' code: by _Float16, or as the upper half of a float.
    double get(const Buffer& b, size_t i) const {
        u16 bits;
        memcpy(&bits, b.data() + i * 2, 2);
        if (c_.f16) {
            _Float16 v;
            memcpy(&v, &bits, 2);
            return double(v);
        }
        u32 wide = u32(bits) << 16;
        float v;
        memcpy(&v, &wide, 4);
        return v;
    }
    void set(Buffer& b, size_t i, double v) {
        u16 bits;
        if (c_.f16) {
            _Float16 half = _Float16(v);
            memcpy(&bits, &half, 2);
        } else {
            float f = float(v);
            u32 wide;
            memcpy(&wide, &f, 4);
            bits = u16(wide >> 16);
        }
        memcpy(b.data() + i * 2, &bits, 2);
    }
    void fill(Buffer& b, size_t first, size_t count, double scale) {
        for (size_t i = 0; i < count; i++) set(b, first + i, random() * scale);
    }
    void fill_f32(Buffer& b, double scale) {
        for (size_t i = 0; i < b.size() / 4; i++) f32(b)[i] = float(random() * scale);
    }
    Matrix wide(const Buffer& b) const {
        Matrix m(b.size() / 2);
        for (size_t i = 0; i < m.size(); i++) m[i] = get(b, i);
        return m;
    }
    Matrix gathered() const {
        Matrix m(size_t(c_.rows) * c_.hidden);
        for (u32 r = 0; r < c_.rows; r++) {
            const u8* at;
            memcpy(&at, row.data() + r * sizeof at, sizeof at);
            for (u32 k = 0; k < c_.hidden; k++) m[size_t(r) * c_.hidden + k] = get(x, size_t(at - x.data()) / 2 + k);
        }
        return m;
    }
    double f32_before(int buffer, size_t i) const {
        float v;
        memcpy(&v, before_[buffer].data() + i * 4, 4);
        return v;
    }
    void compare(const char* what, size_t r, size_t i, double got, Near want) {
        checked_++;
        double off = std::fabs(got - want.value);
        if (!(off <= want.error)) {
            char text[160];
            std::snprintf(text, sizeof text, " %s[%zu][%zu] = %.9g, not %.9g +- %.2g", what, r, i, got, want.value, want.error);
            if (wrong_.size() < 400) wrong_ += text;
        }
        if (want.error > 0 && off / want.error > worst_) worst_ = off / want.error;
    }
    void forward_up() {
        const size_t H = c_.hidden, I = c_.intermediate, G = c_.gated ? 2 * I : I;
        Matrix a = gathered(), wg = c_.gated ? wide(gate) : Matrix(), wu = wide(up);
        for (size_t r = 0; r < c_.rows; r++)
            for (size_t i = 0; i < I; i++) {
                Near u = dot({a.data(), H, 1}, r, {wu.data(), H, 1}, i, H), g = u;
                if (c_.bias) u = plus(u, f32_before(9, i));
                if (c_.gated) {
                    g = dot({a.data(), H, 1}, r, {wg.data(), H, 1}, i, H);
                    if (c_.bias) g = plus(g, f32_before(8, i));
                } else {
                    g = u;
                }
                Near v = value_f32(c_.activation, g);
                compare("h", r, i, get(h, r * I + i), (c_.gated ? times(v, u) : v).rounded(type_));
                if (!c_.training) continue;
                compare("gate_up", r, i, get(gate_up, r * G + i), g.rounded(type_));
                if (c_.gated) compare("gate_up", r, I + i, get(gate_up, r * G + I + i), u.rounded(type_));
            }
    }
    void product_y(bool backward) {
        const size_t H = c_.hidden, I = c_.intermediate, G = c_.gated ? 2 * I : I;
        Matrix a = wide(backward ? gate_up : h), b(H * (backward ? G : I));
        if (backward) {  // [G, H]: gate's rows, then up's
            Matrix wg = c_.gated ? wide(gate) : Matrix(), wu = wide(up);
            wg.insert(wg.end(), wu.begin(), wu.end());
            b = wg;
        } else {
            b = wide(down);
        }
        for (size_t r = 0; r < c_.rows; r++)
            for (size_t i = 0; i < H; i++) {
                Near v = backward ? dot({a.data(), G, 1}, r, {b.data(), 1, H}, i, G) : dot({a.data(), I, 1}, r, {b.data(), I, 1}, i, I);
                if (!backward && c_.bias) v = plus(v, f32_before(10, i));
                compare("y", r, i, get(y, r * H + i), v.rounded(type_));
            }
    }
    void backward_down() {
        const size_t H = c_.hidden, I = c_.intermediate, G = c_.gated ? 2 * I : I;
        Matrix a = gathered(), b = wide(down), seen = wide(before_[2]);
        for (size_t r = 0; r < c_.rows; r++) {
            Near w = exact(c_.weighted ? f32_before(11, r) : 1.0), sum;
            double sizes = 0;
            for (size_t i = 0; i < I; i++) {
                Near q = dot({a.data(), H, 1}, r, {b.data(), 1, I}, i, H), dh = times(w, q);
                double g = seen[r * G + i];
                Near v = value_f32(c_.activation, g), hidden = v, d_g = times(dh, slope_f32(c_.activation, g));
                if (c_.gated) {
                    Near u = exact(seen[r * G + I + i]);
                    hidden = times(v, u);
                    d_g = times(d_g, u);
                    compare("d_up", r, i, get(gate_up, r * G + I + i), times(dh, v).rounded(type_));
                }
                compare("d_gate", r, i, get(gate_up, r * G + i), d_g.rounded(type_));
                compare("w h", r, i, get(h, r * I + i), times(w, hidden).rounded(type_));
                Near part = times(q, hidden);
                sum.value += part.value, sum.error += part.error;
                sizes += std::fabs(part.value) + part.error;
                if (i + 1 == I || (i + 1) % tile_n_ == 0) {
                    size_t tile = i / tile_n_;
                    sum.error += double(i % tile_n_ + 1) * U * sizes;
                    if (c_.weighted) compare("d_weight", r, tile, f32(d_weight)[r * stride_ + tile], sum);
                    sum = {}, sizes = 0;
                }
            }
            u32 untouched;
            memcpy(&untouched, d_weight.data() + (r * stride_ + stride_ - 1) * 4, 4);
            if (untouched != ~0u) wrong_ += " wrote past the partial sums";
        }
    }
    void gradient() {
        const size_t H = c_.hidden, I = c_.intermediate, G = c_.gated ? 2 * I : I, R = c_.rows;
        const bool is_up = c_.kind == GRAD_UP;
        Matrix rows = gathered(), inner = wide(is_up ? gate_up : h);
        const double* d = inner.data() + (is_up && c_.gated && c_.which ? I : 0);
        View of_rows{rows.data(), 1, H}, of_inner{d, 1, is_up ? G : I};
        const size_t m = is_up ? I : H, n = is_up ? H : I;
        for (size_t i = 0; i < m; i++)
            for (size_t j = 0; j < n; j++) {
                Near v = is_up ? dot(of_inner, i, of_rows, j, R) : dot(of_rows, i, of_inner, j, R);
                if (c_.accumulate) v = plus(v, f32_before(13, i * n + j));
                compare("out", i, j, f32(out)[i * n + j], v);
            }
    }
};

}  // namespace reference
