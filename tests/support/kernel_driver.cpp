// Runs the kernels on numbers of its own and prints a line for each: its name, the largest error against sums in double,
// and all results in hexadecimal. Two CPUs whose kernels compute in the same order print the same.
// Linked with linear.cpp and layers.cpp; attention.cpp is included, since its structs are its own.

#include "attention.cpp"

#include <cstdio>
#include <vector>

extern "C" {
long tandem_packed_bytes(long, long);
void tandem_pack(const bfloat16*, long, long, bfloat16*, long, long, long);
void tandem_linear(const bfloat16*, long, long, const bfloat16*, long, long, const bfloat16*, bfloat16*, long, bool);
void tandem_gated(const bfloat16*, long, long, const bfloat16*, long, long, bfloat16*, long);
void tandem_embed(const int64_t*, long, const bfloat16*, long, bfloat16*);
void tandem_rms_norm_float32(const float*, long, long, const float*, float, float*);
void tandem_argmax_bfloat16(const bfloat16*, long, long, int64_t*);
}

namespace {

uint32_t state = 1;

double drawn() {  // in [-1, 1)
    state = state * 1664525u + 1013904223u;
    return double(int32_t(state)) / 2147483648.0;
}

float value_of(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

float value_of(float x) { return x; }

std::vector<bfloat16> halves(long count, double scale = 1) {
    std::vector<bfloat16> found(count);
    for (auto& each : found) {
        const float x = float(drawn() * scale);
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        each.bits = uint16_t(bits >> 16);
    }
    return found;
}

template <typename T>
void say(const char* name, const std::vector<T>& got, const std::vector<double>& expected) {
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) worst = std::max(worst, std::abs(value_of(got[i]) - expected[i]));
    std::printf("%s %.6f ", name, worst);
    for (const T& each : got) {
        uint32_t bits = 0;
        std::memcpy(&bits, &each, sizeof each);
        std::printf("%x", bits);
    }
    std::printf("\n");
}

constexpr long N = 192, K = 160;

void linear_layers(long m) {
    char name[32];
    const auto x = halves(m * K), bias = halves(N);
    const auto weights = halves(N * K, 0.1), others = halves(N * K, 0.1);
    const auto product = [&](long row, long column, const auto& from) {
        double sum = 0;
        for (long i = 0; i < K; i++) sum += double(value_of(x[row * K + i])) * value_of(from[column * K + i]);
        return sum;
    };
    std::vector<bfloat16> out(m * N);
    std::vector<double> expected(m * N);

    std::vector<uint8_t> packed(tandem_packed_bytes(2 * N, K));
    auto* panels = reinterpret_cast<bfloat16*>(packed.data());
    tandem_pack(weights.data(), N, K, panels, N, 0, 0);
    tandem_linear(x.data(), K, m, panels, N, K, bias.data(), out.data(), N, false);
    for (long r = 0; r < m; r++)
        for (long c = 0; c < N; c++) expected[r * N + c] = product(r, c, weights) + value_of(bias[c]);
    std::snprintf(name, sizeof name, "linear-%ld", m);
    say(name, out, expected);

    std::fill(packed.begin(), packed.end(), 0);
    tandem_pack(weights.data(), N, K, panels, 32, 64, 0);
    tandem_pack(others.data(), N, K, panels, 32, 64, 32);
    tandem_gated(x.data(), K, m, panels, N, K, out.data(), N);
    for (long r = 0; r < m; r++)
        for (long c = 0; c < N; c++) {
            const double gate = product(r, c, weights);
            expected[r * N + c] = gate / (1 + std::exp(-gate)) * product(r, c, others);
        }
    std::snprintf(name, sizeof name, "gated-%ld", m);
    say(name, out, expected);
}

void small_layers() {
    const long rows = 3;
    std::vector<float> x(rows * K), weight(K), out(rows * K);
    for (auto& each : x) each = float(drawn());
    for (auto& each : weight) each = float(drawn());
    std::vector<double> expected(rows * K);
    for (long r = 0; r < rows; r++) {
        double sum = 0;
        for (long i = 0; i < K; i++) sum += double(x[r * K + i]) * x[r * K + i];
        for (long i = 0; i < K; i++) expected[r * K + i] = x[r * K + i] / std::sqrt(sum / K + 1e-6) * weight[i];
    }
    tandem_rms_norm_float32(x.data(), rows, K, weight.data(), 1e-6f, out.data());
    say("rms_norm", out, expected);

    const auto logits = halves(rows * K);
    int64_t found[rows];
    tandem_argmax_bfloat16(logits.data(), rows, K, found);
    std::vector<float> places;
    std::vector<double> best;
    for (long r = 0; r < rows; r++) {
        long at = 0;
        for (long i = 1; i < K; i++)
            if (value_of(logits[r * K + i]) > value_of(logits[r * K + at])) at = i;
        places.push_back(float(found[r]));
        best.push_back(at);
    }
    say("argmax", places, best);

    const auto table = halves(N * K);
    std::vector<uint8_t> packed(tandem_packed_bytes(N, K));
    auto* panels = reinterpret_cast<bfloat16*>(packed.data());
    tandem_pack(table.data(), N, K, panels, N, 0, 0);
    const int64_t ids[] = {5, 191, 64};
    std::vector<bfloat16> rows_of(3 * K);
    tandem_embed(ids, 3, panels, K, rows_of.data());
    std::vector<double> wanted;
    for (const int64_t id : ids)
        for (long i = 0; i < K; i++) wanted.push_back(value_of(table[id * K + i]));
    say("embed", rows_of, wanted);
}

void attention_over_blocks() {
    const long heads = 4, kv_heads = 2, dim = 64, block = 16, length = 41, blocks = 3, first = 30;
    const AttentionShape shape{heads, kv_heads, dim, block, 1, 0, dim, heads * dim, 0, 0.125f, 0.0f};
    std::vector<float> keys(length * kv_heads * dim), values(keys.size()), queries(length * heads * dim);
    for (auto* each : {&keys, &values, &queries})
        for (auto& x : *each) x = float(drawn());
    std::vector<float> pool(4 * kv_heads * 2 * block * dim);
    const int32_t table[blocks] = {2, 0, 3};
    std::vector<int64_t> slots;
    for (long t = 0; t < length; t++) slots.push_back(table[t / block] * block + t % block);
    tandem_write_kv(&shape, pool.data(), slots.data(), length, keys.data(), dim, kv_heads * dim, values.data(), dim,
                    kv_heads * dim);
    // a chunk of a prompt, and one decoding token, of the same sequence
    const AttentionItem items[] = {{0, length - 1 - first, first, 0}, {length - 1 - first, 1, length - 1, 0}};
    const long tokens = length - first;
    std::vector<float> out(tokens * heads * dim);
    tandem_attention(&shape, queries.data() + first * heads * dim, pool.data(), table, items, 2, tokens * heads,
                     out.data());
    std::vector<double> expected;
    for (long t = first; t < length; t++)
        for (long h = 0; h < heads; h++) {
            const long kv = h / (heads / kv_heads);
            std::vector<double> weights;
            double total = 0;
            for (long s = 0; s <= t; s++) {
                double score = 0;
                for (long d = 0; d < dim; d++)
                    score += double(queries[(t * heads + h) * dim + d]) * keys[(s * kv_heads + kv) * dim + d];
                weights.push_back(std::exp(score * 0.125));
                total += weights.back();
            }
            for (long d = 0; d < dim; d++) {
                double sum = 0;
                for (long s = 0; s <= t; s++) sum += weights[s] / total * values[(s * kv_heads + kv) * dim + d];
                expected.push_back(sum);
            }
        }
    say("attention", out, expected);
}
}

int main() {
    for (const long m : {1L, 5L, 40L}) linear_layers(m);
    small_layers();
    attention_over_blocks();
}
