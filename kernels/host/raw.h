// Filling and copying memory in the middle of what ThreadSanitizer watches: it replaces memset and memcpy, and would attribute
// what a machine's copy engines do to the calling thread. simt.h's tsan::reads and writes say where it is.
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
