// The most integer products that one core makes of bytes, by the instructions that the kernel's path multiplies with
// and nothing else: no memory, no scales, as many sums as hide how long each takes.
#include <stdint.h>

#if defined(PATH_AVX512VNNI) || defined(PATH_AVXVNNI) || defined(PATH_AVX2)
#include <immintrin.h>
#elif defined(PATH_I8MM) || defined(PATH_DOTPROD)
#include <arm_neon.h>
#endif

enum { SUMS = 12 };

#if defined(PATH_AVX512VNNI)
typedef __m512i vector;
#define KEPT "+v"
#define STEP(s, a, b) s = _mm512_dpbusd_epi32(s, a, b)
#elif defined(PATH_AVXVNNI)
typedef __m256i vector;
#define KEPT "+x"
#define STEP(s, a, b) s = _mm256_dpbusd_avx_epi32(s, a, b)
#elif defined(PATH_AVX2)
typedef __m256i vector;
#define KEPT "+x"
#define STEP(s, a, b) s = _mm256_add_epi16(s, _mm256_maddubs_epi16(a, b))
#elif defined(PATH_I8MM)
typedef int32x4_t vector;
#define KEPT "+w"
#define STEP(s, a, b) s = vmmlaq_s32(s, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))
#elif defined(PATH_DOTPROD)
typedef int32x4_t vector;
#define KEPT "+w"
#define STEP(s, a, b) s = vdotq_s32(s, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))
#else
typedef int32_t vector __attribute__((vector_size(16)));
#define KEPT "+g"
#define STEP(s, a, b) s += a * b
#endif

// Operations (a product or a sum) of one step of one vector.
#if defined(PATH_I8MM)
enum { OPERATIONS = 64 };
#elif defined(PATH_PLAIN)
enum { OPERATIONS = 8 };
#else
enum { OPERATIONS = 2 * sizeof(vector) };
#endif

// Multiplies `rounds` times SUMS vectors; returns operations done.
__attribute__((visibility("default"))) int64_t peak(int64_t rounds) {
    vector s[SUMS], a, b;
    uint8_t bytes[sizeof(vector)];
    for (unsigned k = 0; k < sizeof bytes; k++) bytes[k] = (uint8_t)(k + rounds % 3);
    __builtin_memcpy(&a, bytes, sizeof a);
    b = a;
    for (int k = 0; k < SUMS; k++) s[k] = a;
    for (int64_t round = 0; round < rounds; round++) {
        // Neither may be known to the compiler, or it would do this once.
        __asm__ volatile("" : KEPT(a), KEPT(b));
#pragma GCC unroll 12
        for (int k = 0; k < SUMS; k++) STEP(s[k], a, b);
    }
    for (int k = 0; k < SUMS; k++) __asm__ volatile("" : KEPT(s[k]));
    return rounds * SUMS * OPERATIONS;
}
