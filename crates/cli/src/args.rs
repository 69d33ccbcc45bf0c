//! The verbs. What each one takes is declared beside the code that reads it.

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, cache, completions, convert, demo, doctor, export, inspect, man, plan, sample, shard,
    train, verify,
};

/// Fine-tunes image and language models on the computer you own, and knows before it starts that
/// the run will fit in memory, finish, and not cook the machine.
#[derive(Debug, Parser)]
#[command(name = "hearth", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Args {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    Demo(demo::Arguments),
    Doctor(doctor::Arguments),
    Inspect(inspect::Arguments),
    Shard(shard::Arguments),
    Convert(convert::Arguments),
    Cache(cache::Arguments),
    Plan(plan::Arguments),
    Train(train::Arguments),
    Sample(sample::Arguments),
    Export(export::Arguments),
    Verify(verify::Arguments),
    Bench(bench::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
}

const AFTER_HELP: &str = "\
Examples:
  hearth demo                    a whole fine-tuning on a small built-in model, in a minute or two
  hearth doctor                  what this computer is, what of it hearth will use, what is wrong
  hearth inspect model.gguf      the tensors of a model file, and what is odd about them
  hearth train --images my-cat --base stable-diffusion-3.5-medium --out cat
  hearth sample --base sd3 --prompt 'a red fox in the snow'
  hearth help doctor             all about one verb

Exit codes:
  0    fine
  1    failed; standard error says why and gives a hint
  2    wrong usage
  130  interrupted";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_declarations_agree_with_each_other() {
        super::Args::command().debug_assert();
    }
}
