/* Which instruction families this machine has. */
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives the state of the tiles to a process that asks. */
static int may_use_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static int has_amx(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return (d >> 22 & 1) && (d >> 24 & 1) && may_use_tiles();
}
#else
static int has_amx(void) { return 0; }
#endif

const char *processor(void)
{
#if defined(__x86_64__)
    static char name[13];
    unsigned a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d)) {
        memcpy(name, &b, 4);
        memcpy(name + 4, &d, 4);
        memcpy(name + 8, &c, 4);
        return name;
    }
#endif
    return "unknown";
}

static int is_usable(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512bf16");
    if (!strcmp(name, "avx2"))
        return avx2;
    if (!strcmp(name, "avx512"))
        return avx512;
    if (!strcmp(name, "amx"))
        return avx512 && has_amx();
#endif
    return !strcmp(name, "portable");
}

const char *const *kernel_names(void)
{
    static const char *names[5];
    static const char *const all[] = {"amx", "avx512", "avx2", "portable"};
    int count = 0;
    for (int i = 0; i < 4; i++)
        if (is_usable(all[i]))
            names[count++] = all[i];
    names[count] = NULL;
    return names;
}

const kernels_t *find_kernels(const char *name)
{
    if (!is_usable(name))
        return NULL;
#if defined(__x86_64__)
    if (!strcmp(name, "amx"))
        return &kernels_amx;
    if (!strcmp(name, "avx512"))
        return &kernels_avx512;
    if (!strcmp(name, "avx2"))
        return &kernels_avx2;
#endif
    return &kernels_portable;
}
