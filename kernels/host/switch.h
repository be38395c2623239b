// A context switch between stacks for x86-64 System V: callee-saved registers and the stack pointer. The floating-point control words are
// the same everywhere and are not switched.
#pragma once

#ifndef __x86_64__
#error "kernels/host switches stacks on x86-64 only"
#endif

namespace aristos::host {

extern "C" void aristos_switch_stack(void** save, void* to);

// A stack that enters `entry`, which never returns, at the first switch to it. `top` is 16-byte aligned.
inline void* new_stack(char* top, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(top);
    *--sp = nullptr;                             // return address of `entry`
    *--sp = reinterpret_cast<void*>(entry);      // return address of the switch
    for (int i = 0; i < 6; ++i) *--sp = nullptr;  // rbx, rbp, r12 to r15
    return sp;
}

}  // namespace aristos::host
