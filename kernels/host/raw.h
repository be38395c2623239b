// Fills and copies memory in a way that ThreadSanitizer does not see. The sanitizer intercepts memset and memcpy, and would attribute the
// work of emulated copy engines to the calling thread; simt.h's tsan::reads and writes declare these accesses instead.
#pragma once
#include "../params.h"

namespace aristos::host {

inline void raw_fill(void* to, u8 value, u64 bytes) {
    asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
}

inline void raw_copy(void* to, const void* from, u64 bytes) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
}

}  // namespace aristos::host
