// What ThreadSanitizer has to be told. The kernels are compiled with it, the runtime is not: what the runtime does to memory
// and which of its meetings order memory is said here. Each CUDA thread is a fiber of the sanitizer's, so that races between
// threads of one block are seen though they share an OS thread.
#pragma once

#ifdef ARISTOS_TSAN
extern "C" {
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
