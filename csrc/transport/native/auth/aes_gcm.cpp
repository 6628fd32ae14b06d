// Note [GHASH]
// GCM's hash is a polynomial over GF(2^128) whose bits are in reverse order. Blocks are loaded with their bytes
// reversed. The product of two such values is that of the field but for a shift by one bit, for which the hash key is
// shifted beforehand. Sixteen blocks are multiplied by sixteen powers of the key, added, and reduced once (Gueron and
// Kounavis, "Intel Carry-Less Multiplication Instruction and its Usage for Computing the GCM Mode"; the reduction folds
// 64 bits at a time).

#include "transport/native/auth/aes_gcm.h"

#include <algorithm>
#include <cstring>
#include <sodium.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define TORCHRPC_VAES __attribute__((target("avx2,aes,pclmul,vaes,vpclmulqdq")))
#define TORCHRPC_VAES_INLINE TORCHRPC_VAES __attribute__((always_inline)) inline
#endif

namespace torchrpc::native {

#if defined(__x86_64__)

namespace {

using Schedule = VectorAesGcm::Schedule;
constexpr size_t kBlock = VectorAesGcm::kBlockBytes;
constexpr size_t kWide = VectorAesGcm::kPowers * kBlock;  // bytes of one step
constexpr int kRegisters = kWide / (2 * kBlock);

TORCHRPC_VAES_INLINE __m128i load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
TORCHRPC_VAES_INLINE void store(void* to, __m128i value) { _mm_storeu_si128(static_cast<__m128i*>(to), value); }
TORCHRPC_VAES_INLINE __m256i load2(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
TORCHRPC_VAES_INLINE void store2(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

TORCHRPC_VAES_INLINE __m128i reversed(__m128i block) {
  return _mm_shuffle_epi8(block, _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
TORCHRPC_VAES_INLINE __m256i reversed2(__m256i blocks) {
  return _mm256_shuffle_epi8(
      blocks, _mm256_broadcastsi128_si256(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
}

// ---- AES ----

TORCHRPC_VAES_INLINE __m128i encryptBlock(const Schedule& schedule, __m128i block) {
  block = _mm_xor_si128(block, load(schedule.round_keys[0]));
  for (size_t i = 1; i < VectorAesGcm::kRounds; ++i) block = _mm_aesenc_si128(block, load(schedule.round_keys[i]));
  return _mm_aesenclast_si128(block, load(schedule.round_keys[VectorAesGcm::kRounds]));
}

template <int kRoundConstant>
TORCHRPC_VAES_INLINE void expandTwo(__m128i& even, __m128i& odd, unsigned char (*keys)[kBlock], bool last) {
  const auto assisted = _mm_aeskeygenassist_si128(odd, kRoundConstant);
  auto key = even;
  key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
  key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
  even = _mm_xor_si128(key, _mm_shuffle_epi32(assisted, 0xff));
  store(keys[0], even);
  if (last) return;
  const auto second = _mm_aeskeygenassist_si128(even, 0);
  key = odd;
  key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
  key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
  odd = _mm_xor_si128(key, _mm_shuffle_epi32(second, 0xaa));
  store(keys[1], odd);
}

TORCHRPC_VAES void expandKey(Schedule& schedule, const unsigned char* key) {
  auto even = load(key), odd = load(key + kBlock);
  auto* keys = schedule.round_keys;
  store(keys[0], even);
  store(keys[1], odd);
  expandTwo<0x01>(even, odd, keys + 2, false);
  expandTwo<0x02>(even, odd, keys + 4, false);
  expandTwo<0x04>(even, odd, keys + 6, false);
  expandTwo<0x08>(even, odd, keys + 8, false);
  expandTwo<0x10>(even, odd, keys + 10, false);
  expandTwo<0x20>(even, odd, keys + 12, false);
  expandTwo<0x40>(even, odd, keys + 14, true);
}

// ---- GHASH ----

/// Sums of products that are not reduced yet: the low, the middle and the high 128 bits.
struct Product2 {
  __m256i low, middle, high;
};

TORCHRPC_VAES_INLINE void addProduct(Product2& sum, __m256i a, __m256i b) {
  sum.low = _mm256_xor_si256(sum.low, _mm256_clmulepi64_epi128(a, b, 0x00));
  sum.middle = _mm256_xor_si256(sum.middle, _mm256_clmulepi64_epi128(a, b, 0x01));
  sum.middle = _mm256_xor_si256(sum.middle, _mm256_clmulepi64_epi128(a, b, 0x10));
  sum.high = _mm256_xor_si256(sum.high, _mm256_clmulepi64_epi128(a, b, 0x11));
}

TORCHRPC_VAES_INLINE __m128i addLanes(__m256i value) {
  return _mm_xor_si128(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
}

/// The reduced sum of both lanes.
TORCHRPC_VAES_INLINE __m128i reduce(const Product2& sum) {
  const auto low = addLanes(sum.low);
  auto middle = addLanes(sum.middle), high = addLanes(sum.high);
  const auto polynomial = _mm_set_epi64x(static_cast<int64_t>(0xc200000000000000), 1);
  middle = _mm_xor_si128(middle, _mm_shuffle_epi32(low, 0x4e));
  middle = _mm_xor_si128(middle, _mm_clmulepi64_si128(low, polynomial, 0x10));
  high = _mm_xor_si128(high, _mm_shuffle_epi32(middle, 0x4e));
  return _mm_xor_si128(high, _mm_clmulepi64_si128(middle, polynomial, 0x10));
}

TORCHRPC_VAES_INLINE __m128i multiply(__m128i a, __m128i b) {
  Product2 product{_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  addProduct(product, _mm256_zextsi128_si256(a), _mm256_zextsi128_si256(b));
  return reduce(product);
}

TORCHRPC_VAES void makePowers(Schedule& schedule) {
  auto key = reversed(encryptBlock(schedule, _mm_setzero_si128()));
  // Shifted by one bit, modulo the polynomial.
  const auto carry = _mm_srai_epi32(_mm_shuffle_epi32(key, 0xd3), 31);
  key = _mm_add_epi64(key, key);
  key = _mm_xor_si128(key, _mm_and_si128(carry, _mm_set_epi64x(static_cast<int64_t>(0xc200000000000001), 1)));
  auto power = key;
  for (size_t i = VectorAesGcm::kPowers; i-- > 0;) {
    store(schedule.powers[i], power);
    power = multiply(power, key);
  }
}

/// Adds sixteen blocks.
TORCHRPC_VAES_INLINE __m128i hashWide(const Schedule& schedule, __m128i hash, const char* from) {
  Product2 sum{_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  auto first = _mm256_xor_si256(reversed2(load2(from)), _mm256_zextsi128_si256(hash));
  addProduct(sum, first, load2(schedule.powers[0]));
  for (int i = 1; i < kRegisters; ++i) {
    addProduct(sum, reversed2(load2(from + 2 * kBlock * i)), load2(schedule.powers[2 * i]));
  }
  return reduce(sum);
}

TORCHRPC_VAES_INLINE __m128i hashBlock(const Schedule& schedule, __m128i hash, __m128i block) {
  return multiply(_mm_xor_si128(hash, reversed(block)), load(schedule.powers[VectorAesGcm::kPowers - 1]));
}

/// Less than a block, followed by zeros.
TORCHRPC_VAES_INLINE __m128i loadPart(const char* from, size_t bytes) {
  alignas(16) char block[kBlock] = {};
  std::memcpy(block, from, bytes);
  return load(block);
}

// ---- GCM ----

/// `counter`: the counter block with its bytes reversed.
TORCHRPC_VAES_INLINE __m128i nextKeyBlock(const Schedule& schedule, __m128i& counter) {
  const auto block = encryptBlock(schedule, reversed(counter));
  counter = _mm_add_epi32(counter, _mm_set_epi32(0, 0, 0, 1));
  return block;
}

/// Encrypts or decrypts sixteen blocks.
TORCHRPC_VAES_INLINE void applyWide(const Schedule& schedule, __m128i& counter, const char* from, char* to) {
  __m256i blocks[kRegisters];
  auto counters = _mm256_add_epi32(_mm256_broadcastsi128_si256(counter), _mm256_set_epi32(0, 0, 0, 1, 0, 0, 0, 0));
  const auto first_key = _mm256_broadcastsi128_si256(load(schedule.round_keys[0]));
  for (int i = 0; i < kRegisters; ++i) {
    blocks[i] = _mm256_xor_si256(reversed2(counters), first_key);
    counters = _mm256_add_epi32(counters, _mm256_set_epi32(0, 0, 0, 2, 0, 0, 0, 2));
  }
  for (size_t round = 1; round < VectorAesGcm::kRounds; ++round) {
    const auto key = _mm256_broadcastsi128_si256(load(schedule.round_keys[round]));
    for (int i = 0; i < kRegisters; ++i) blocks[i] = _mm256_aesenc_epi128(blocks[i], key);
  }
  const auto last_key = _mm256_broadcastsi128_si256(load(schedule.round_keys[VectorAesGcm::kRounds]));
  for (int i = 0; i < kRegisters; ++i) {
    blocks[i] = _mm256_aesenclast_epi128(blocks[i], last_key);
    store2(to + 2 * kBlock * i, _mm256_xor_si256(blocks[i], load2(from + 2 * kBlock * i)));
  }
  counter = _mm_add_epi32(counter, _mm_set_epi32(0, 0, 0, 2 * kRegisters));
}

/// Encrypts or decrypts, and returns the tag.
template <bool kSeals>
TORCHRPC_VAES __m128i apply(
    const Schedule& schedule, const VectorAesGcm::Nonce& nonce, std::string_view associated, const char* from,
    size_t bytes, char* to) {
  alignas(16) unsigned char initial[kBlock] = {};
  std::memcpy(initial, nonce.data(), nonce.size());
  initial[kBlock - 1] = 1;
  auto counter = reversed(load(initial));
  const auto mask = nextKeyBlock(schedule, counter);
  auto hash = _mm_setzero_si128();
  for (auto rest = associated; !rest.empty(); rest.remove_prefix(std::min(rest.size(), kBlock))) {
    hash = hashBlock(schedule, hash, loadPart(rest.data(), std::min(rest.size(), kBlock)));
  }
  size_t done = 0;
  for (; bytes - done >= kWide; done += kWide) {
    if (!kSeals) hash = hashWide(schedule, hash, from + done);
    applyWide(schedule, counter, from + done, to + done);
    if (kSeals) hash = hashWide(schedule, hash, to + done);
  }
  for (; done < bytes; done += kBlock) {
    const auto some = std::min(bytes - done, kBlock);
    const auto block = loadPart(from + done, some);
    const auto key_block = nextKeyBlock(schedule, counter);
    alignas(16) char out[kBlock];
    store(out, _mm_xor_si128(block, key_block));
    std::memcpy(to + done, out, some);
    hash = hashBlock(schedule, hash, kSeals ? loadPart(out, some) : block);
  }
  const auto bits = _mm_set_epi64x(static_cast<int64_t>(associated.size() * 8), static_cast<int64_t>(bytes * 8));
  hash = multiply(_mm_xor_si128(hash, bits), load(schedule.powers[VectorAesGcm::kPowers - 1]));
  return _mm_xor_si128(reversed(hash), mask);
}

}  // namespace

bool VectorAesGcm::isAvailable() {
  static const bool is_available = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("aes") &&
      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("vaes") && __builtin_cpu_supports("vpclmulqdq") &&
      crypto_aead_aes256gcm_is_available() != 0 && agreesWithSodium(600);
  return is_available;
}

bool VectorAesGcm::agreesWithSodium(size_t bytes) {
  const auto asBytes = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  const SecretKey key("a key that has thirty-two bytes.");
  const Nonce nonce{'o', 'n', 'c', 'e'};
  const std::string_view associated = "associated";
  std::string plain(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) plain[i] = static_cast<char>(i * i);
  std::string ours(bytes + kTagBytes, '\0'), theirs = ours;
  VectorAesGcm(key).seal(nonce, associated, plain, ours.data());
  crypto_aead_aes256gcm_encrypt(
      reinterpret_cast<unsigned char*>(theirs.data()), nullptr, asBytes(plain), bytes, asBytes(associated),
      associated.size(), nullptr, nonce.data(), key.data());
  return ours == theirs;
}

VectorAesGcm::VectorAesGcm(const SecretKey& key) {
  expandKey(schedule_, key.data());
  makePowers(schedule_);
}

void VectorAesGcm::seal(const Nonce& nonce, std::string_view associated, std::span<const char> plain, char* out) const {
  const auto tag = apply<true>(schedule_, nonce, associated, plain.data(), plain.size(), out);
  std::memcpy(out + plain.size(), &tag, sizeof(tag));
}

bool VectorAesGcm::open(
    const Nonce& nonce, std::string_view associated, std::span<const char> sealed, char* out) const {
  if (sealed.size() < kTagBytes) return false;
  const auto bytes = sealed.size() - kTagBytes;
  std::array<unsigned char, kTagBytes> expected;
  std::memcpy(expected.data(), sealed.data() + bytes, kTagBytes);  // `out` may be where `sealed` begins
  const auto tag = apply<false>(schedule_, nonce, associated, sealed.data(), bytes, out);
  if (sodium_memcmp(&tag, expected.data(), kTagBytes) == 0) return true;
  if (bytes > 0) std::memset(out, 0, bytes);
  return false;
}

#else

bool VectorAesGcm::isAvailable() { return false; }
bool VectorAesGcm::agreesWithSodium(size_t /*bytes*/) { return false; }
VectorAesGcm::VectorAesGcm(const SecretKey& /*key*/) : schedule_{} {}
void VectorAesGcm::seal(const Nonce&, std::string_view, std::span<const char>, char*) const {}
bool VectorAesGcm::open(const Nonce&, std::string_view, std::span<const char>, char*) const { return false; }

#endif

VectorAesGcm::~VectorAesGcm() { sodium_memzero(&schedule_, sizeof(schedule_)); }

}  // namespace torchrpc::native
