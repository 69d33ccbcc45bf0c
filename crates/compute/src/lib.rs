//! Arithmetic in memory we own: one arena per device, contiguous tensors, about thirty ops, a tape,
//! and the engines behind them, one of which computes shapes only. Knows no layer's name and reads
//! no file.
