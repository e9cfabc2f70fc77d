/* Filters and the choice of a token, a line of logits at a time; lines run side by side. Sampling is defined in
 * headway/runner/sampler.py: the hash is the same bit for bit, the logarithms to about one unit in the last place. */
#include "headway.h"
#include "simd.h"

#define BLOCK 64          /* ids that are looked at together */
#define LANES 1024        /* groups of ids; up to this top_k their maxima bound the k-th largest logit from below */
#define MOST_NOISE 22.9f  /* 33 log 2: the hash has 32 bits */
#define LEAST_NOISE -3.2f /* -log(33 log 2) */

enum { NOTHING_LEFT = -1, LOGIT_IS_NAN = -2, LOGIT_IS_INFINITE = -3 };

_Static_assert(sizeof(hw_sampling_record) == 40, "RowRecord has no gaps");

/* ---- a line, block by block ---- */

/* Block `first` of the line: in place, or copied to `tail` and filled up where the line ends within it. */
HW_INLINE const float *block_at(const float *line, int64_t first, int64_t vocab, float *tail) {
    if (first + BLOCK <= vocab) return line + first;
    for (int64_t i = 0; i < BLOCK; i++) tail[i] = first + i < vocab ? line[first + i] : -INFINITY;
    return tail;
}

HW_INLINE float block_max(const float *x) {
    vf top = vf_load(x);
    HW_UNROLL
    for (int i = HW_VL; i < BLOCK; i += HW_VL) top = vf_max(top, vf_load(x + i));
    return vf_reduce_max(top);
}

/* The largest logit of a line; NaN if any is. */
static float largest(const float *line, int64_t vocab) {
    float tail[BLOCK];
    vf top = vf_set1(-INFINITY), magnitude = vf_set1(0.0f);
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        const float *x = block_at(line, first, vocab, tail);
        HW_UNROLL
        for (int i = 0; i < BLOCK; i += HW_VL) {
            vf values = vf_load(x + i);
            top = vf_max(top, values);
            magnitude = vf_max_magnitude(magnitude, vf_abs(values));
        }
    }
    return isnan(vf_reduce_max_magnitude(magnitude)) ? NAN : vf_reduce_max(top);
}

static int32_t first_equal(const float *line, int64_t vocab, float highest) {
    float tail[BLOCK];
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        const float *x = block_at(line, first, vocab, tail);
        if (block_max(x) < highest) continue;
        for (int i = 0; i < BLOCK; i++)
            if (x[i] == highest) return (int32_t)(first + i);
    }
    return NOTHING_LEFT;
}

/* The logits of at least `cut`, in order; returns how many. */
static int64_t collect(const float *line, int64_t vocab, float cut, float *out) {
    float tail[BLOCK];
    int64_t count = 0;
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        const float *x = block_at(line, first, vocab, tail);
        if (block_max(x) < cut) continue;
        int64_t size = vocab - first < BLOCK ? vocab - first : BLOCK;
        for (int64_t i = 0; i < size; i++) {
            out[count] = x[i];
            count += x[i] >= cut;
        }
    }
    return count;
}

/* ---- thresholds ---- */

HW_INLINE float middle_of_three(const float *x, int64_t count) {
    float a = x[0], b = x[count / 2], c = x[count - 1];
    float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* Puts the values above the pivot first, then those equal to it, then those below. */
HW_INLINE void partition(float *x, int64_t count, float pivot, int64_t *above, int64_t *not_below) {
    int64_t a = 0, i = 0, b = count;
    while (i < b) {
        float value = x[i];
        if (value > pivot) {
            x[i++] = x[a];
            x[a++] = value;
        } else if (value < pivot) {
            x[i] = x[--b];
            x[b] = value;
        } else {
            i++;
        }
    }
    *above = a, *not_below = b;
}

/* The k-th largest of `count` values, k from 1; they are reordered. */
static float kth_largest(float *x, int64_t count, int64_t k) {
    for (;;) {
        float pivot = middle_of_three(x, count);
        int64_t above, not_below;
        partition(x, count, pivot, &above, &not_below);
        if (k <= above) {
            count = above;
        } else if (k <= not_below) {
            return pivot;
        } else {
            x += not_below, count -= not_below, k -= not_below;
        }
    }
}

static float top_k_cut(const float *line, int64_t vocab, int64_t k, float *scratch) {
    float bound = -INFINITY;
    if (k <= LANES && vocab > 2 * LANES) {
        float lanes[LANES];
        memcpy(lanes, line, sizeof lanes);
        int64_t first = LANES;
        for (; first + LANES <= vocab; first += LANES)
            for (int i = 0; i < LANES; i += HW_VL)
                vf_store(lanes + i, vf_max(vf_load(lanes + i), vf_load(line + first + i)));
        bound = kth_largest(lanes, LANES, k);
    }
    return kth_largest(scratch, collect(line, vocab, bound, scratch), k);
}

/* exp((x - highest) / temperature) in place, for a block. */
HW_INLINE void weights_of(float *x, float highest, float inverse_temperature) {
    for (int i = 0; i < BLOCK; i += 4 * HW_VL) {
        vf e[4];
        HW_UNROLL
        for (int j = 0; j < 4; j++)
            e[j] = vf_mul(vf_sub(vf_load(x + i + j * HW_VL), vf_set1(highest)), vf_set1(inverse_temperature));
        vf_exp_many(e, 4);
        HW_UNROLL
        for (int j = 0; j < 4; j++) vf_store(x + i + j * HW_VL, e[j]);
    }
}

/* The sum of a block: few numbers in float32, the rest in double. */
HW_INLINE double sum_of(const float *x) {
    float sums[16] = {0};
    double sum = 0.0;
    for (int i = 0; i < BLOCK; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += x[i + j];
    for (int j = 0; j < 16; j++) sum += sums[j];
    return sum;
}

/* The sum of the weights of all logits of at least `cut`; the highest weighs 1. */
static double total_weight(const float *line, int64_t vocab, float cut, float highest, float inverse_temperature) {
    float tail[BLOCK], weights[BLOCK];
    double total = 0.0;
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        const float *x = block_at(line, first, vocab, tail);
        if (block_max(x) < cut) continue;
        memcpy(weights, x, sizeof weights);
        weights_of(weights, highest, inverse_temperature);
        for (int i = 0; i < BLOCK; i++) weights[i] = x[i] >= cut ? weights[i] : 0.0f;
        total += sum_of(weights);
    }
    return total;
}

/* The highest logit such that it and those above weigh at least `wanted`. `x` are all that may be; reordered. */
static float nucleus_cut(float *x, int64_t count, double wanted, float highest, float inverse_temperature) {
    double before = 0.0;
    float lowest = highest;
    while (count > 0) {
        float pivot = middle_of_three(x, count), weights[BLOCK];
        int64_t above, not_below;
        partition(x, count, pivot, &above, &not_below);
        double sum = 0.0;
        for (int64_t first = 0; first < above; first += BLOCK) {
            float tail[BLOCK];
            memcpy(weights, block_at(x, first, above, tail), sizeof weights);
            weights_of(weights, highest, inverse_temperature);
            sum += sum_of(weights);
        }
        double equal = hw_exp((pivot - highest) * inverse_temperature) * (double)(not_below - above);
        if (before + sum >= wanted) {
            count = above;
        } else if (before + sum + equal >= wanted) {
            return pivot;
        } else {
            before += sum + equal;
            lowest = pivot;
            x += not_below, count -= not_below;
        }
    }
    return lowest; /* rounding */
}

/* The lowest logit that min_p, top_k and top_p keep. */
static float threshold_of(const float *line, int64_t vocab, const hw_sampling_record *record, float highest) {
    float cut = highest + record->min_p_offset, inverse_temperature = record->inverse_temperature;
    if (record->top_k == 0 && record->top_p >= 1.0) return cut;
    float *scratch = hw_scratch(HW_SCRATCH_SAMPLING, ((size_t)vocab + BLOCK) * sizeof(float));
    if (record->top_k > 0) {
        float kth = top_k_cut(line, vocab, record->top_k, scratch);
        cut = kth > cut ? kth : cut;
    }
    if (record->top_p < 1.0) {
        double total = total_weight(line, vocab, cut, highest, inverse_temperature);
        /* What weighs less than (1 - top_p) of the mean weighs less than 1 - top_p of the total in all. */
        float spare = ((float)log((1.0 - record->top_p) * total / (double)vocab) - 0.01f) / inverse_temperature;
        float start = highest + spare > cut ? highest + spare : cut;
        int64_t count = collect(line, vocab, start, scratch);
        float nucleus = nucleus_cut(scratch, count, record->top_p * total, highest, inverse_temperature);
        cut = nucleus > cut ? nucleus : cut;
    }
    return cut;
}

/* ---- noise ---- */

HW_INLINE uint64_t mix64(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

HW_INLINE uint32_t mix32(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

/* log(x) in place, for normal numbers above zero: a polynomial around 1 and the exponent, to about 1 ulp. */
HW_INLINE void log_block(float *x) {
    int32_t bits[BLOCK], mantissas[BLOCK];
    float exponents[BLOCK], fractions[BLOCK];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK; i++) {
        int32_t exponent = (bits[i] - 0x3f3504f3) >> 23; /* mantissas from sqrt(1/2) to sqrt(2) */
        mantissas[i] = bits[i] - (int32_t)((uint32_t)exponent << 23);
        exponents[i] = (float)exponent;
    }
    memcpy(fractions, mantissas, sizeof fractions);
    for (int i = 0; i < BLOCK; i++) {
        float f = fractions[i] - 1.0f, square = f * f, p = 7.0376836292e-2f;
        p = p * f - 1.1514610310e-1f;
        p = p * f + 1.1676998740e-1f;
        p = p * f - 1.2420140846e-1f;
        p = p * f + 1.4249322787e-1f;
        p = p * f - 1.6668057665e-1f;
        p = p * f + 2.0000714765e-1f;
        p = p * f - 2.4999993993e-1f;
        p = p * f + 3.3333331174e-1f;
        p = p * f * square - 2.12194440e-4f * exponents[i] - 0.5f * square;
        x[i] = f + p + 0.693359375f * exponents[i];
    }
}

HW_INLINE void hash_block(uint32_t key_low, uint32_t key_high, uint32_t first, uint32_t *bits) {
    for (uint32_t i = 0; i < BLOCK; i++) bits[i] = mix32(mix32(first + i + key_low) ^ key_high);
}

/* u from the hash; as a float it has the exponent of noise: noise < -log(u) <= -log(2) * exponent. */
HW_INLINE void unit_block(const uint32_t *bits, float *u) {
    for (int i = 0; i < BLOCK; i++) u[i] = ((float)bits[i] + 0.5f) * 0x1p-32f;
}

/* -log(-log(1 - u)). Small u make large noise, which is what wins: there the inner logarithm is taken from its series,
 * as 1 - u has lost the digits of u. Elsewhere 1 - u comes from the complement of the hash, which has its own. */
HW_INLINE void noise_block(const uint32_t *bits, const float *u, float *noise) {
    for (int i = 0; i < BLOCK; i++) noise[i] = ((float)~bits[i] + 0.5f) * 0x1p-32f;
    log_block(noise);
    for (int i = 0; i < BLOCK; i++) noise[i] = u[i] < 0x1p-8f ? u[i] * (1.0f + 0.5f * u[i]) : -noise[i];
    log_block(noise);
    for (int i = 0; i < BLOCK; i++) noise[i] = -noise[i];
}

/* ---- the choice ---- */

/* Whether a score of the block may be above `best`, by a bound of the noise that needs no logarithm. */
HW_INLINE int may_win(const float *x, const float *u, float inverse_temperature, float best) {
    int32_t bits[BLOCK];
    float bounds[BLOCK];
    memcpy(bits, u, sizeof bits);
    for (int i = 0; i < BLOCK; i++) bounds[i] = (float)(127 - (bits[i] >> 23)) * 0.69315f + 0.0001f;
    for (int i = 0; i < BLOCK; i++) bounds[i] = x[i] * inverse_temperature + bounds[i];
    return block_max(bounds) >= best;
}

static int32_t draw(const float *line, int64_t vocab, const hw_sampling_record *record, int64_t position,
                    float highest) {
    uint64_t key = mix64(record->seed + 0x9E3779B97F4A7C15u);
    key = mix64(key + (uint64_t)position * 0xD1342543DE82EF95u + 0x9E3779B97F4A7C15u);
    uint32_t key_low = (uint32_t)key, key_high = (uint32_t)(key >> 32);
    float inverse_temperature = record->inverse_temperature;
    float threshold = threshold_of(line, vocab, record, highest);
    /* The highest logit has at least this score, so nothing below it is of interest. */
    float best = -INFINITY, reached = highest * inverse_temperature + LEAST_NOISE;
    if (reached == INFINITY) return LOGIT_IS_INFINITE;
    int32_t token = NOTHING_LEFT;
    float tail[BLOCK], u[BLOCK], scores[BLOCK];
    uint32_t bits[BLOCK];
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        const float *x = block_at(line, first, vocab, tail);
        float top = block_max(x);
        if (top < threshold || top * inverse_temperature + MOST_NOISE < reached) continue;
        hash_block(key_low, key_high, (uint32_t)first, bits);
        unit_block(bits, u);
        if (!may_win(x, u, inverse_temperature, reached)) continue;
        noise_block(bits, u, scores);
        for (int i = 0; i < BLOCK; i++) scores[i] = x[i] * inverse_temperature + scores[i];
        if (block_max(scores) < reached) continue;
        for (int i = 0; i < BLOCK; i++) {
            if (scores[i] > best && x[i] >= threshold) {
                best = scores[i];
                token = (int32_t)(first + i);
            }
        }
        reached = best > reached ? best : reached;
    }
    return token;
}

typedef struct {
    const float *logits;
    int64_t vocab;
    const int64_t *rows, *positions;
    const hw_sampling_record *records;
    int32_t *tokens;
} sample_job;

static void sample_task(void *context, int64_t item) {
    const sample_job *job = context;
    const float *line = job->logits + item * job->vocab;
    const hw_sampling_record *record = job->records + job->rows[item];
    float highest = largest(line, job->vocab);
    int32_t token;
    if (isnan(highest))
        token = LOGIT_IS_NAN;
    else if (isinf(highest))
        token = highest > 0 ? LOGIT_IS_INFINITE : NOTHING_LEFT;
    else if (record->inverse_temperature == 0.0f)
        token = first_equal(line, job->vocab, highest);
    else
        token = draw(line, job->vocab, record, job->positions[item], highest);
    job->tokens[item] = token;
}

void hw_sample_tokens(const float *logits, int64_t lines, int64_t vocab, const int64_t *rows, const int64_t *positions,
                      const hw_sampling_record *records, int32_t *tokens) {
    sample_job job = {logits, vocab, rows, positions, records, tokens};
    hw_parallel(sample_task, &job, lines);
}

/* ---- masks ------------------------------------------------------------------------------------------------------ */

typedef struct {
    float *logits;
    int64_t vocab;
    const int32_t *lines;
    const uint32_t *masks;
    int64_t words;
} mask_job;

static void mask_task(void *context, int64_t item) {
    const mask_job *job = context;
    float *line = job->logits + job->lines[item] * job->vocab;
    const uint32_t *mask = job->masks + item * job->words;
    for (int64_t start = 0; start < job->vocab; start += 32) {
        uint32_t allowed = mask[start / 32];
        if (allowed == UINT32_MAX)
            continue;
        int64_t count = job->vocab - start < 32 ? job->vocab - start : 32;
        for (int64_t i = 0; i < count; i++) /* a choice, not a jump, so that several are made at once */
            line[start + i] = (allowed >> i) & 1 ? line[start + i] : -INFINITY;
    }
}

void hw_mask_logits(float *logits, int64_t vocab, const int32_t *lines, const uint32_t *masks, int64_t num_masks,
                    int64_t words_per_mask) {
    mask_job job = {logits, vocab, lines, masks, words_per_mask};
    hw_parallel(mask_task, &job, num_masks);
}
