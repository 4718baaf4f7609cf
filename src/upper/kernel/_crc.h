/* The CRC-32 of zlib; included in _compiled.pyx through _writer.h and _run.pxi.
 *
 * Frames of the journal are long: where the processor multiplies without carries, 64 bytes are folded in a step, as in
 * "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Gopal and others, Intel, 2009). Keys are short,
 * and other processors take eight bytes a step from tables. */
#ifndef UPPER_CRC
#define UPPER_CRC
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define UPPER_CLMUL
#include <immintrin.h>
#endif

static uint32_t crc_table[8][256];
static int crc_folds; /* whether the processor has the instruction */

static void crc_prepare(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        crc_table[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc_table[k][i] = crc_table[k - 1][i] >> 8 ^ crc_table[0][crc_table[k - 1][i] & 0xFF];
#ifdef UPPER_CLMUL
    crc_folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

static inline uint32_t crc_by_table(uint32_t crc, const uint8_t *p, size_t length) {
    for (; length >= 8; length -= 8, p += 8)
        crc = crc_table[7][p[0] ^ (crc & 0xFF)] ^ crc_table[6][p[1] ^ (crc >> 8 & 0xFF)]
            ^ crc_table[5][p[2] ^ (crc >> 16 & 0xFF)] ^ crc_table[4][p[3] ^ crc >> 24]
            ^ crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]] ^ crc_table[0][p[7]];
    while (length--) crc = crc >> 8 ^ crc_table[0][(crc ^ *p++) & 0xFF];
    return crc;
}

#ifdef UPPER_CLMUL
#define CRC_LOAD(p) _mm_loadu_si128((const __m128i *)(p))
#define CRC_FOLD(x, by, next) \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next)

/* The CRC of at least 64 bytes, in blocks of 16. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t crc, const uint8_t *p, size_t length) {
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i by_4 = _mm_set_epi64x(0, 0x163cd6124), polynomial = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(CRC_LOAD(p), _mm_cvtsi32_si128((int)crc)), b = CRC_LOAD(p + 16), c = CRC_LOAD(p + 32), d = CRC_LOAD(p + 48), e;
    for (p += 64, length -= 64; length >= 64; p += 64, length -= 64) {
        a = CRC_FOLD(a, by_64, CRC_LOAD(p));
        b = CRC_FOLD(b, by_64, CRC_LOAD(p + 16));
        c = CRC_FOLD(c, by_64, CRC_LOAD(p + 32));
        d = CRC_FOLD(d, by_64, CRC_LOAD(p + 48));
    }
    a = CRC_FOLD(a, by_16, b);
    a = CRC_FOLD(a, by_16, c);
    a = CRC_FOLD(a, by_16, d);
    for (; length >= 16; p += 16, length -= 16) a = CRC_FOLD(a, by_16, CRC_LOAD(p));
    /* 128 bits to 64, to 32. */
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), by_4, 0x00));
    e = _mm_clmulepi64_si128(_mm_and_si128(a, low), polynomial, 0x10);
    e = _mm_clmulepi64_si128(_mm_and_si128(e, low), polynomial, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, e), 1);
}
#endif

/* Continue `crc` (0: nothing yet) with these bytes. */
static inline uint32_t crc_more(uint32_t crc, const uint8_t *p, size_t length) {
    crc = ~crc;
#ifdef UPPER_CLMUL
    if (length >= 128 && crc_folds) {
        size_t whole = length & ~(size_t)15;
        crc = crc_by_folding(crc, p, whole);
        p += whole, length -= whole;
    }
#endif
    return ~crc_by_table(crc, p, length);
}

static inline uint32_t crc_of(const uint8_t *p, size_t length) { return crc_more(0, p, length); }
#endif
