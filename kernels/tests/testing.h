// Framework for kernel tests: cases with checks, and worlds to launch in.
//
//     CASE(name) { World world(2, 1 << 20); world.launch(0, "kernel", grid, block, shared_bytes, a, b); CHECK(x == y); }
//
// Under ThreadSanitizer a case fails if a race is reported in it; with ExpectRaces it fails if none is.
//
// testing_main runs every case, or those whose name contains an argument, prints the failures, and returns 1 if there are any. A case
// whose name begins with "tsan" also runs under ThreadSanitizer; programs with such cases are built both ways (tests/kernels.rs).
#pragma once
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../host/host.h"
#include "../platform.h"

namespace testing {

using namespace aristos;

struct Case {
    const char* name;
    void (*body)();
    Case* next;
    inline static Case* first = nullptr;
    inline static int failures = 0;
    Case(const char* n, void (*b)()) : name(n), body(b), next(nullptr) {
        Case** last = &first;
        while (*last) last = &(*last)->next;
        *last = this;
    }
};

#define CASE(name)                                             \
    static void case_##name();                                 \
    static testing::Case registered_case_##name(#name, case_##name); \
    static void case_##name()

// A failed check does not end the case. Only the first 20 failures of a case are printed.
#define CHECK(condition, ...)                                                              \
    do {                                                                                   \
        if (!(condition) && ++testing::Case::failures <= 20) {                             \
            std::printf("  %s:%d: %s ", __FILE__, __LINE__, #condition);                   \
            std::printf(" " __VA_ARGS__);                                                   \
            std::printf("\n");                                                             \
        }                                                                                  \
    } while (0)

// Number of races that ThreadSanitizer has reported.
inline std::atomic<int> races{0};

struct ExpectRaces {
    ExpectRaces() : before(races) {}
    ~ExpectRaces() {
        CHECK(races > before, "no race was reported");
        races = before;
    }
    int before;
};

class World {
  public:
    explicit World(u32 n_pes = 1, u64 heap_bytes = 1 << 20, u64 seed = 1, const u8* reachable = nullptr)
        : world_(aristos_host_world(n_pes, heap_bytes, seed, reachable)) {
        if (!world_) {
            std::printf("  %s\n", aristos_host_error());
            std::exit(1);
        }
    }
    ~World() { aristos_host_free(world_); }
    World(const World&) = delete;
    void* get() const { return world_; }
    template <class T = char> T* heap(u32 pe, u64 offset = 0) const {
        return reinterpret_cast<T*>(aristos_host_heap(world_, pe, pe) + offset);
    }
    // The launch's error, or an empty string.
    template <class... P>
    std::string try_launch(u32 pe, const char* kernel, u32 grid, u32 block, u32 shared_bytes, P... parameters) const {
        void* args[] = {static_cast<void*>(&parameters)..., nullptr};
        return aristos_host_launch(world_, pe, kernel, grid, block, shared_bytes, args) == 0 ? "" : aristos_host_error();
    }
    template <class... P>
    void launch(u32 pe, const char* kernel, u32 grid, u32 block, u32 shared_bytes, P... parameters) const {
        const std::string error = try_launch(pe, kernel, grid, block, shared_bytes, parameters...);
        CHECK(error.empty(), "%s", error.c_str());
    }

  private:
    void* world_;
};

inline int testing_main(int argc, char** argv) {
    int failed = 0, run = 0;
    for (Case* c = Case::first; c; c = c->next) {
#ifdef ARISTOS_TSAN
        if (std::strncmp(c->name, "tsan", 4) != 0) continue;
#endif
        bool wanted = argc < 2;
        for (int i = 1; i < argc; ++i) wanted = wanted || std::strstr(c->name, argv[i]);
        if (!wanted) continue;
        ++run;
        Case::failures = 0;
        races = 0;
        const u64 start = dev::nanoseconds();
        c->body();
        CHECK(races == 0, "%d races were reported", races.load());
        std::printf("%s %s (%.0f ms)\n", Case::failures ? "FAILED" : "ok", c->name, double(dev::nanoseconds() - start) / 1e6);
        std::fflush(stdout);
        failed += Case::failures != 0;
    }
    // The last line shows that the program has completed.
    std::printf("%d cases, %d failed\n", run, failed);
    return failed || run == 0;
}

}  // namespace testing

#ifdef ARISTOS_TSAN
extern "C" {
// ThreadSanitizer's hooks. The sanitizer calls the first for every report and the second once at the start. The exit code stays 0, because
// cases decide what a report means. Reports at equal addresses are not suppressed, because worlds of different cases use the same
// addresses.
__attribute__((visibility("default"))) void __tsan_on_report(void*) { ++testing::races; }
__attribute__((visibility("default"))) const char* __tsan_default_options() { return "exitcode=0:suppress_equal_addresses=0"; }
}
#endif
