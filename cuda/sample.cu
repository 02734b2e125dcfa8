// Drawing tokens from logits, and judging drafts by the draws. Twin: gpu_worker/model/sampler.py, draw and draft.
//
// struct DrawParams is described in gpu_worker/device/draw_params.py: one record a sequence of the step.
//
// Kernels:
//
//   draw(int* drawn, const float* logits, int columns, const DrawParams* params, const int* tokens, const int* positions,
//        const int* row_begin, const int* row_count, const int* drafts, const int* draw_rows, const int* draw_seq)
//     grid N x 1024 threads. Draw n is from logits[n] (float32 [N][columns]) of row r = draw_rows[n] of sequence
//     s = draw_seq[n] (either < 0: padding, drawn[n] is left alone), for position positions[r] + 1. Drafts of s before it in
//     the step count as tokens for penalties. drawn[n]: token, -1 the logits are not finite, -2 no token is left.
//
//   draw_draft(int* tokens, const float* logits, int columns, const int* ids, const int* column_of, int vocab,
//              const DrawParams* params, const int* positions, const int* row_begin, int depth)
//     grid S x 1024. Sequence s drafts from logits[s] for position positions[s] + 1 (positions[s] < 0: it does not), behind
//     `depth` drafts of this step. Column c stands for token ids[c], and column_of[token] int32 [vocab] is its column or -1;
//     both null: column c is token c. Result, -1 if there is none, to tokens[row_begin[s] + 1 + depth].
//
//   accept(int* accepted, const int* drawn, const int* tokens, const int* row_begin, const int* row_count, const int* drafts,
//          const int* first_draw, int sequences)
//     one thread a sequence. accepted[s]: how many of its drafts, in order, equal the draws in their places; a draft behind
//     which the draw failed does not count, so drawn[first_draw ... first_draw + accepted] are tokens, or accepted is 0 and
//     drawn[first_draw] says why there is none. -1 where it draws nothing (first_draw[s] < 0).
