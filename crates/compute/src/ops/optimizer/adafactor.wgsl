// Adafactor, a parameter at a time: means of squares by row and by column, or of each element, then the size of the step,
// then the step. `sums` are what the step is multiplied by, what a parameter loses of itself, the mean of the rows of each
// matrix, and from `place` on the sums of shares.

var<workgroup> column_parts: array<f32, 256>;

// A workgroup for each row.
kernel adafactor_rows(gradient: [f32], rows: mut [f32], norm: [f32], columns: u32, keeps: f32, news: f32, epsilon: f32,
                      most: f32, scale: f32) {
    var scale = p.scale;
    var is_defined = true;
    if has_norm() {
        let size = scale * norm(0u);
        is_defined = is_finite(size);
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    var sum = 0.0;
    for (var i = lane; i < p.columns; i += THREADS) {
        let g = scale * gradient(group * p.columns + i);
        sum += g * g;
    }
    sum = group_sum(lane, sum);
    if lane != 0u || !is_defined { return; }
    set_rows(group, rows(group) * p.keeps + (sum / f32(p.columns) + p.epsilon) * p.news);
}

// A workgroup for `tile` columns of a matrix, whose other threads share its rows.
kernel adafactor_columns(gradient: [f32], means: mut [f32], norm: [f32], rows: u32, columns: u32, tile: u32, keeps: f32,
                         news: f32, epsilon: f32, most: f32, scale: f32) {
    var scale = p.scale;
    var is_defined = true;
    if has_norm() {
        let size = scale * norm(0u);
        is_defined = is_finite(size);
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    let tiles = (p.columns + p.tile - 1u) / p.tile;
    let matrix = group / tiles;
    let column = group % tiles * p.tile + lane % p.tile;
    var sum = 0.0;
    if column < p.columns {
        for (var row = lane / p.tile; row < p.rows; row += THREADS / p.tile) {
            let g = scale * gradient((matrix * p.rows + row) * p.columns + column);
            sum += g * g;
        }
    }
    column_parts[lane] = sum;
    workgroupBarrier();
    if lane >= p.tile || column >= p.columns || !is_defined { return; }
    for (var i = lane + p.tile; i < THREADS; i += p.tile) { sum += column_parts[i]; }
    let at = matrix * p.columns + column;
    set_means(at, means(at) * p.keeps + (sum / f32(p.rows) + p.epsilon) * p.news);
}

// A thread for each element.
kernel adafactor_whole(gradient: [f32], second: mut [f32], norm: [f32], n: u32, keeps: f32, news: f32, epsilon: f32,
                       most: f32, scale: f32) {
    if thread >= p.n { return; }
    var scale = p.scale;
    if has_norm() {
        let size = scale * norm(0u);
        if !is_finite(size) { return; }
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    let g = scale * gradient(thread);
    set_second(thread, second(thread) * p.keeps + (g * g + p.epsilon) * p.news);
}

// A workgroup for each matrix.
kernel adafactor_row_mean(rows: [f32], sums: mut [f32], n: u32) {
    var sum = 0.0;
    for (var i = lane; i < p.n; i += THREADS) { sum += rows(group * p.n + i); }
    sum = group_sum(lane, sum);
    if lane == 0u { set_sums(2u + group, sum / f32(p.n)); }
}

// A workgroup for every `share` elements writes the sums of the squares of the direction and of the parameter.
kernel adafactor_squares(param: [f32], gradient: [f32], rows: [f32], columns: [f32], sums: mut [f32], norm: [f32],
                         n_rows: u32, n_columns: u32, n: u32, share: u32, place: u32, most: f32, scale: f32) {
    var scale = p.scale;
    if has_norm() { scale *= min(1.0, p.most / (scale * norm(0u) + 1e-6)); }
    var along = 0.0;
    var size = 0.0;
    for (var i = group * p.share + lane; i < min((group + 1u) * p.share, p.n); i += THREADS) {
        let x = direction_at(i, scale * gradient(i));
        along += x * x;
        size += param(i) * param(i);
    }
    along = group_sum(lane, along);
    size = group_sum(lane, size);
    if lane == 0u {
        set_sums(p.place + 2u * group, along);
        set_sums(p.place + 2u * group + 1u, size);
    }
}

// What a step is proportional to at a place, of whole or of factored moments.
fn direction_at(at: u32, g: f32) -> f32 {
    if !has_columns() { return g / sqrt(rows(at)); }
    let row = at / p.n_columns;
    let matrix = row / p.n_rows;
    return g / sqrt(rows(row) / sums(2u + matrix)) / sqrt(columns(matrix * p.n_columns + at % p.n_columns));
}

// One workgroup.
kernel adafactor_length(sums: mut [f32], place: u32, groups: u32, n: u32, rate: f32, decay: f32, least_size: f32,
                        threshold: f32, by_size: u32) {
    var along = 0.0;
    var size = 0.0;
    for (var i = lane; i < p.groups; i += THREADS) {
        along += sums(p.place + 2u * i);
        size += sums(p.place + 2u * i + 1u);
    }
    along = group_sum(lane, along);
    size = group_sum(lane, size);
    if lane != 0u { return; }
    var rate = p.rate;
    if p.by_size == 1u { rate *= larger(sqrt(size / f32(p.n)), p.least_size); }
    set_sums(0u, rate / larger(sqrt(along / f32(p.n)) / p.threshold, 1.0));
    set_sums(1u, rate * p.decay);
}

// A thread for each element.
kernel adafactor_apply(param: mut [f32], gradient: [f32], rows: [f32], columns: [f32], sums: [f32], norm: [f32],
                       n_rows: u32, n_columns: u32, n: u32, most: f32, scale: f32) {
    if thread >= p.n { return; }
    var scale = p.scale;
    if has_norm() {
        let size = scale * norm(0u);
        if !is_finite(size) { return; }
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    let along = along_at(thread, scale * gradient(thread));
    set_param(thread, param(thread) - (param(thread) * sums(1u) + sums(0u) * along));
}

// As above.
fn along_at(at: u32, g: f32) -> f32 {
    if !has_columns() { return g / sqrt(rows(at)); }
    let row = at / p.n_columns;
    let matrix = row / p.n_rows;
    return g / sqrt(rows(row) / sums(2u + matrix)) / sqrt(columns(matrix * p.n_columns + at % p.n_columns));
}
