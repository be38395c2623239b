// Declarations for ThreadSanitizer. Kernels are compiled with it but the runtime is not, so the runtime's memory accesses and the
// synchronisation that orders memory are declared here. Each CUDA thread is a fiber of the sanitizer, so that it finds races between
// threads of a block although they share an OS thread.
#pragma once
#include <cstdlib>
#include <new>
#include <vector>

#ifdef ARISTOS_TSAN
extern "C" {
void* __libc_malloc(size_t);
void __libc_free(void*);
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
}
#endif

namespace aristos::host::tsan {

#ifdef ARISTOS_TSAN
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: orders nothing
inline void acquire(const void* p) { __tsan_acquire(const_cast<void*>(p)); }
inline void release(const void* p) { __tsan_release(const_cast<void*>(p)); }
inline void reads(const void* p, unsigned long bytes) { __tsan_read_range(const_cast<void*>(p), bytes); }
inline void writes(void* p, unsigned long bytes) { __tsan_write_range(p, bytes); }
#else
inline void* current_fiber() { return nullptr; }
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void*) {}
inline void switch_to(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
inline void reads(const void*, unsigned long) {}
inline void writes(void*, unsigned long) {}
#endif

}  // namespace aristos::host::tsan

namespace aristos::host {

// For memory of the runtime that one fiber allocates and another frees, which the sanitizer's malloc would report as a race.
template <class T> struct Untracked {
    using value_type = T;
    Untracked() = default;
    template <class U> Untracked(const Untracked<U>&) {}
    T* allocate(std::size_t n) {
        static_assert(alignof(T) <= 16, "malloc aligns to 16");
#ifdef ARISTOS_TSAN
        void* p = __libc_malloc(n * sizeof(T));
#else
        void* p = std::malloc(n * sizeof(T));
#endif
        if (!p) throw std::bad_alloc();
        return static_cast<T*>(p);
    }
    void deallocate(T* p, std::size_t) {
#ifdef ARISTOS_TSAN
        __libc_free(p);
#else
        std::free(p);
#endif
    }
    template <class U> bool operator==(const Untracked<U>&) const { return true; }
    template <class U> bool operator!=(const Untracked<U>&) const { return false; }
};
template <class T> using UntrackedVector = std::vector<T, Untracked<T>>;

}  // namespace aristos::host
