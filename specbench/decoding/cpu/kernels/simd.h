// Vectors of floats as wide as the processor's registers, in the vector extensions of GCC and Clang.
//
// Every kernel here computes each token of a pass by the same operations in the same order, however many tokens the
// pass has: the logits of a token are the same bits whether it is decoded alone or verified among others.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int REGISTERS = 32;
#else
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(float))));

template <class V, class T>
inline V load(const T* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof vector); }

// a * b + c, rounded once where the processor can. Written out: a compiler that contracts where it likes to would round
// one number of tokens otherwise than another.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The lanes' sum, in an order of its own that is always the same.
inline float sum(Floats vector) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(vector);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(vector), _mm256_extractf128_ps(vector, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__)
  return vaddvq_f32(vector);
#else
  float total = 0;
  for (int lane = 0; lane < LANES; lane++) total += vector[lane];
  return total;
#endif
}

// Numbers are read in blocks of VECTORS vectors. Of bfloat16 a block lies in the words of one vector: their lower halves
// are the first vector, their upper halves the second.
template <class T>
constexpr int VECTORS = sizeof(float) / sizeof(T);
template <class T>
constexpr int64_t BLOCK = VECTORS<T> * LANES;

inline void load_block(const float* from, Floats* to) { to[0] = load<Floats>(from); }

inline void load_block(const uint16_t* from, Floats* to) {
  Words pairs = load<Words>(from);
  to[0] = (Floats)(pairs << 16);
  to[1] = (Floats)(pairs & 0xffff0000u);
}
