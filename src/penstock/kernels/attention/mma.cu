template <bool HALF> DEVICE void mma(float (&s)[4], const uint (&left)[4], uint upper, uint lower) {
    if (HALF)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(upper), "r"(lower));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(upper), "r"(lower));
}
template <bool HALF, int ROWS, int D> DEVICE void product_with_turned(
    float (&sums)[ROWS / 8][4], const uint (&left)[D / 16][4], uint tile) {
    int lane = THREAD % 32, row = lane % 8 + lane / 16 * 8;
    clear(sums);
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++) {
            uint b[4], from = tile + chunk_place<ROWS>(j * 16 + row, step * 2 + lane / 8 % 2);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
            mma<HALF>(sums[2 * j], left[step], b[0], b[1]);
            mma<HALF>(sums[2 * j + 1], left[step], b[2], b[3]);
        }
}
template <bool HALF, int ROWS, int D> DEVICE void add_product(
    float (&sums)[D / 8][4], const uint (&left)[ROWS / 16][4], uint tile) {
    int lane = THREAD % 32;
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++)
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            uint b[4], from = tile + chunk_place<ROWS>(step * 16 + lane % 16, j * 2 + lane / 16);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
            mma<HALF>(sums[2 * j], left[step], b[0], b[1]);
            mma<HALF>(sums[2 * j + 1], left[step], b[2], b[3]);
        }
}
template <int LEFT> DEVICE void products_end() {}
template <int N> DEVICE void settled(float (&sums)[N][4]) {}
