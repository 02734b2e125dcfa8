// The library's C interface, for ctypes. The caller owns all memory that it passes in; one call runs all layers of a step.
#include "model.h"

extern "C" {

int pk_abi() { return 6; }

// Instruction sets that the compiler was allowed to use, as /proc/cpuinfo names them.
const char* pk_features() {
  return ""
#ifdef __AVX2__
         " avx2"
#endif
#ifdef __FMA__
         " fma"
#endif
#ifdef __F16C__
         " f16c"
#endif
#ifdef PK_AVX512
         " avx512f avx512bw avx512vl avx512dq"
#endif
#ifdef __AVX512BF16__
         " avx512_bf16"
#endif
#ifdef __AVX512VNNI__
         " avx512_vnni"
#endif
      ;
}

Model* pk_model(const Shape* shape, int threads) { return new Model(*shape, threads); }

void pk_free(Model* model) { delete model; }

void pk_set_rope(Model* model, const float* cos, const float* sin, int positions) { model->set_rope(cos, sin, positions); }

void pk_set_layer(Model* model, int index, const Layer* layer) { model->layer(index) = *layer; }

void pk_set_ends(Model* model, const Matrix* embed, const Matrix* output, const float* norm) {
  model->embed = *embed;
  model->output = *output;
  model->final_norm = norm;
}

void pk_set_head(Model* model, const HeadWeights* head) { model->head.set(*head); }

int pk_forward(Model* model, const Step* step) { return model->forward(*step); }

int pk_draft(Model* model, const Step* step) { return model->draft(*step); }

int pk_draft_greedy(Model* model, const Step* step, const int32_t* counts, const int64_t* ids, int most, int64_t* out) {
  return model->draft_greedy(*step, counts, ids, most, out);
}

void pk_logits(Model* model, const float* hidden, int rows, float* out) { model->logits(model->output, hidden, rows, out); }

void pk_draft_logits(Model* model, const float* hidden, int rows, float* out) {
  model->logits(model->head.weights.draft, hidden, rows, out);
}

size_t pk_packed_bytes(int format, int n, int k) {
  Matrix m{format, n, k, nullptr, nullptr};
  return m.panels() * m.panel_bytes();
}

// Rows first .. first + rows of a dense matrix: values [rows][k], float32 or bfloat16 bits.
void pk_pack_dense(int format, int k, const void* values, int first, int rows, uint8_t* out) {
  Matrix m{format, first + rows, k, out, nullptr};
  for (int r = 0; r < rows; r++) {
    const int row = first + r, lane = row % LANES;
    uint8_t* panel = const_cast<uint8_t*>(m.panel(row / LANES));
    if (format == F32)
      for (int i = 0; i < k; i++) ((float*)panel)[(size_t)i * LANES + lane] = ((const float*)values)[(size_t)r * k + i];
    else
      for (int i = 0; i < k; i++) ((bf16*)panel)[((size_t)(i / 2) * LANES + lane) * 2 + i % 2] = ((const bf16*)values)[(size_t)r * k + i];
  }
}

// Rows first .. first + rows of a quantised matrix: quants [rows][k] (int8, or uint8 0..15), half scale and, for Q4, minimum
// [rows][k / 32].
void pk_pack_quants(int format, int k, const uint8_t* quants, const uint16_t* scale, const uint16_t* minimum, int first, int rows,
                    uint8_t* out) {
  Matrix m{format, first + rows, k, out, nullptr};
  for (int r = 0; r < rows; r++)
    for (int g = 0; g < k / GROUP; g++) {
      const int row = first + r;
      const int lane = row % LANES;
      const uint8_t* q = quants + (size_t)r * k + g * GROUP;
      uint8_t* group = const_cast<uint8_t*>(m.panel(row / LANES)) + g * (format == Q8 ? Q8_BYTES : Q4_BYTES);
      const size_t at = (size_t)r * (k / GROUP) + g;
      if (format == Q8) {
        for (int i = 0; i < GROUP; i++) group[i * LANES + lane] = q[i];
        ((uint16_t*)(group + GROUP * LANES))[lane] = scale[at];
        continue;
      }
      for (int j = 0; j < 4; j++) {
        uint32_t word = 0;
        for (int i = 0; i < 8; i++) word |= (uint32_t)q[j * 8 + i] << (4 * (i / 2 + i % 2 * 4));
        ((uint32_t*)group)[j * LANES + lane] = word;
      }
      ((uint16_t*)(group + 256))[lane] = scale[at];
      ((uint16_t*)(group + 256))[LANES + lane] = minimum[at];
    }
}
}
