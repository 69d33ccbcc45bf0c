//! How a run is shown.

/// How a run is shown.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ScreenArgs {
    /// Print nothing but warnings and errors
    #[arg(long)]
    pub quiet: bool,

    /// Print every event as a line of JSON
    #[arg(long)]
    pub json: bool,

    /// Print lines, also in a terminal, in place of the dashboard
    #[arg(long)]
    pub plain: bool,

    /// Show it in a browser too, as `hearth serve` does
    #[arg(long)]
    pub serve: bool,
}

impl ScreenArgs {
    /// Of ranks but the first, which speaks for all: warnings, and nothing else.
    pub const SILENT: Self = Self { quiet: true, json: false, plain: false, serve: false };
}
