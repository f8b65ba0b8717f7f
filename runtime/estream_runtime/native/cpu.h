// Which paths the processor at hand can take.
#pragma once

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static int runs_here(const char *path) {
#if defined(__x86_64__)
    unsigned a = 0, b, c, d;
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(path, "avx2")) return avx2;
    if (!strcmp(path, "avx512vnni"))
        return avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    // Older compilers have no word for it: bit 4 of EAX of leaf 7, subleaf 1.
    if (!strcmp(path, "avxvnni")) return avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
#elif defined(__aarch64__) && defined(__linux__)
    int dot = !!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP);
    if (!strcmp(path, "dotprod")) return dot;
    if (!strcmp(path, "i8mm")) return dot && getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    if (!strcmp(path, "dotprod")) return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) && has;
    if (!strcmp(path, "i8mm")) return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0) && has;
#endif
    return !strcmp(path, "plain");
}
