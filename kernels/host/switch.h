// A context switch between stacks, x86-64 System V: the registers that a call keeps, and the stack pointer. The floating-point
// control words are the same everywhere and are not switched.
#pragma once

#ifndef __x86_64__
#error "kernels/host switches stacks on x86-64 only"
#endif

namespace aristos::host {

extern "C" void aristos_switch_stack(void** save, void* to);

// A stack that enters `entry`, which never returns, when it is first switched to. `top` is 16-byte aligned.
inline void* new_stack(char* top, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(top);
    *--sp = nullptr;                             // where `entry` would return to
    *--sp = reinterpret_cast<void*>(entry);      // where the switch returns to
    for (int i = 0; i < 6; ++i) *--sp = nullptr;  // rbx, rbp, r12 to r15
    return sp;
}

}  // namespace aristos::host
