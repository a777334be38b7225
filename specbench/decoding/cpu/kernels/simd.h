// Vectors of floats as wide as the processor's registers, in the vector extensions of GCC and Clang.
//
// Every kernel here computes each token of a pass by the same operations in the same order, however many tokens the
// pass has: the logits of a token are the same bits whether it is decoded alone or verified among others.
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "g++ 12 or newer is needed"
#endif

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

// Loops over arrays that are to be registers.
#define UNROLLED _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(float))));

template <class V, class T>
inline V load(const T* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Keeps a vector in its register: a compiler would read it from memory again for each operation, or move it to the stack.
inline Floats in_register(Floats vector) {
#if defined(__AVX512F__) || defined(__AVX2__)
  asm volatile("" : "+v"(vector));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(vector));
#endif
  return vector;
}

inline Floats broadcast(float number) { return number - Floats{}; }

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

// a * b + c of two numbers in bfloat16 in each word of a and b, where the processor has an instruction for that.
#if defined(__AVX512BF16__)
constexpr bool HAS_DOTS = true;
inline Floats dot(Floats a, Floats b, Floats c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool HAS_DOTS = false;
inline Floats dot(Floats, Floats, Floats c) { return c; }
#endif

template <int QUAD>
inline Quad quad(Floats vector) {
  constexpr int first = 4 * QUAD;
  return __builtin_shufflevector(vector, vector, first, first + 1, first + 2, first + 3);
}

#if defined(__AVX512F__)
inline Quad sum_quads(Floats vector) {
  return (quad<0>(vector) + quad<1>(vector)) + (quad<2>(vector) + quad<3>(vector));
}
#define IN_QUADS(a, b, c, d) \
  a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
#elif defined(__aarch64__)
inline Quad sum_quads(Floats vector) { return vector; }
#define IN_QUADS(a, b, c, d) a, b, c, d
#else
inline Quad sum_quads(Floats vector) { return quad<0>(vector) + quad<1>(vector); }
#define IN_QUADS(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
#endif

// The sums of the lanes of four vectors, each in the same order wherever it stands.
inline Quad lane_sums(const Floats* vectors) {
  static constexpr int B = LANES;  // the first lane of the second vector
  auto halved = [](Floats a, Floats b) {
    return __builtin_shufflevector(a, b, IN_QUADS(0, B, 1, B + 1)) +
           __builtin_shufflevector(a, b, IN_QUADS(2, B + 2, 3, B + 3));
  };
  Floats a = halved(vectors[0], vectors[1]), b = halved(vectors[2], vectors[3]);
  return sum_quads(__builtin_shufflevector(a, b, IN_QUADS(0, 1, B, B + 1)) +
                   __builtin_shufflevector(a, b, IN_QUADS(2, 3, B + 2, B + 3)));
}

// Numbers are read in blocks of VECTORS vectors. Of bfloat16 a block lies in the words of one vector: their lower halves
// are the first vector, their upper halves the second.
template <class T>
constexpr int VECTORS = sizeof(float) / sizeof(T);
template <class T>
constexpr int64_t BLOCK = VECTORS<T> * LANES;

inline Floats load_vector(const float* block, int) { return load<Floats>(block); }

inline Floats load_vector(const uint16_t* block, int vector) {
  Words pairs = load<Words>(block);
  return (Floats)(vector == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

// The words of a block of bfloat16, from the numbers of its first and of its second vector.
inline Words pairs_of(const uint16_t* low, const uint16_t* high) {
  typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
  return __builtin_convertvector(load<Halves>(low), Words) | __builtin_convertvector(load<Halves>(high), Words) << 16;
}

template <class T>
inline void load_block(const T* from, Floats* to) {
  for (int vector = 0; vector < VECTORS<T>; vector++) to[vector] = load_vector(from, vector);
}
