//! The commands. The arguments of each are declared beside the code that reads them.

use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{
    bench, cache, caption, chat, clip_score, completions, convert, demo, doctor, evaluate, export,
    fetch, import, inspect, man, plan, render_chat, runs, sample, serve, shard, train, verify,
    watch,
};

/// Fine-tunes image and language models (LoRA, DoRA or full) on your own computer. Plans memory to the byte
/// before it starts, resumes bit for bit, and keeps the machine cool.
#[derive(Debug, Parser)]
#[command(name = "hearth", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(subcommand)]
    pub command: CliCommand,
}

#[derive(Debug, Subcommand)]
pub enum CliCommand {
    Demo(demo::DemoArgs),
    Fetch(fetch::FetchArgs),
    Doctor(doctor::DoctorArgs),
    Inspect(inspect::InspectArgs),
    Shard(shard::ShardArgs),
    Convert(convert::ConvertArgs),
    Caption(caption::CaptionArgs),
    Cache(cache::CacheArgs),
    Plan(plan::PlanArgs),
    Train(train::TrainArgs),
    Watch(watch::WatchArgs),
    Runs(runs::RunsArgs),
    Sample(sample::SampleArgs),
    Chat(chat::ChatArgs),
    Evaluate(evaluate::EvaluateArgs),
    ClipScore(clip_score::ClipScoreArgs),
    Export(export::ExportArgs),
    Import(import::ImportArgs),
    Serve(serve::ServeArgs),
    Verify(verify::VerifyArgs),
    Bench(bench::BenchArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
    #[command(hide = true)]
    RenderChat(render_chat::RenderChatArgs),
}

/// The program and the commands that were typed, as far as they are known: `hearth bench step`.
pub fn command_line() -> String {
    let (mut command, mut words) = (&Cli::command(), vec!["hearth".to_owned()]);
    for word in std::env::args().skip(1) {
        let Some(verb) = command.find_subcommand(&word) else { break };
        (command, words) = (verb, [words, vec![word]].concat());
    }
    words.join(" ")
}

const AFTER_HELP: &str = "\
Examples:
  hearth demo                    fine-tune a small built-in model, in a minute or two
  hearth doctor                  this computer's hardware, what of it hearth uses, what is wrong
  hearth inspect model.gguf      the tensors of a model file, and what looks wrong
  hearth fetch stabilityai/stable-diffusion-3.5-medium
  hearth train --images my-cat --base stabilityai/stable-diffusion-3.5-medium --out cat
  hearth sample --base sd3 --prompt 'a red fox in the snow'
  hearth help doctor             help on one command

Exit codes:
  0    success
  1    failed; standard error says why and gives a hint
  2    wrong usage
  130  interrupted";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::error::ErrorKind;
    use clap::{Command, CommandFactory, Parser};

    use super::Cli;

    #[test]
    fn the_declarations_agree_with_each_other() {
        Cli::command().debug_assert();
    }

    /// The words of a shell's line up to a comment, or to what is not the program's any more.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for c in line.chars() {
            match quote {
                Some(end) if c == end => quote = None,
                None if c == '\'' || c == '"' => {
                    word.get_or_insert_default();
                    quote = Some(c);
                }
                None if c.is_whitespace() => words.extend(word.take()),
                _ => word.get_or_insert_default().push(c),
            }
        }
        words.extend(word);
        let end = words.iter().position(|it| it.starts_with(['#', '&', '|', '>', ';', '…', '[']));
        words.truncate(end.unwrap_or(words.len()));
        words
    }

    /// That a command of ours would be understood.
    fn check(line: &str) -> Result<(), (ErrorKind, String)> {
        match Cli::try_parse_from(words(line)) {
            Err(error) if error.kind() != ErrorKind::DisplayHelp => {
                Err((error.kind(), format!("{line}\n{error}")))
            }
            _ => Ok(()),
        }
    }

    /// Lines of ours within blocks of code.
    fn in_blocks(text: &str) -> Vec<String> {
        let blocks = text.split("```").skip(1).step_by(2).map(|block| block.replace("\\\n", " "));
        let ours = |line: &str| line.replacen("cargo run --release --", "hearth", 1);
        let lines = blocks.flat_map(|block| block.lines().map(ours).collect::<Vec<_>>());
        lines.filter(|line| line.starts_with("hearth ")).collect()
    }

    /// What sentences quote of ours.
    fn in_sentences(text: &str) -> Vec<String> {
        let sentences = text.split("```").step_by(2);
        let quoted = sentences.flat_map(|text| text.split('`').skip(1).step_by(2));
        let quoted = quoted.map(|code| code.replace('\n', " "));
        quoted.filter(|code| code.starts_with("hearth ")).collect()
    }

    /// The examples of a command and its subcommands; a comment follows after a gap.
    fn of_help(command: &Command) -> Vec<String> {
        let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let text = text.replace("\\\n", " ");
        let examples = text.lines().filter_map(|line| line.strip_prefix("  hearth "));
        let own =
            examples.map(|line| format!("hearth {}", line.split("   ").next().unwrap_or(line)));
        own.chain(command.get_subcommands().flat_map(of_help)).collect()
    }

    #[test]
    fn every_command_that_is_shown_is_understood() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let (mut whole, mut parts) = (of_help(&Cli::command()), Vec::new());
        for path in docs.chain([root.join("README.md")]) {
            let text = std::fs::read_to_string(path).unwrap();
            whole.extend(in_blocks(&text));
            parts.extend(in_sentences(&text));
        }
        assert!(whole.len() > 50 && parts.len() > 50, "{whole:#?} {parts:#?}");
        let wrong = whole.iter().filter_map(|line| check(line).err());
        // Sentences leave out what does not matter to them.
        let unknown = parts.iter().filter_map(|part| check(part).err());
        let unknown = unknown.filter(|(kind, _)| *kind == ErrorKind::UnknownArgument);
        let wrong: Vec<_> = wrong.chain(unknown).map(|(_, text)| text).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(check("hearth sample folder --prompt 'a fox'").is_err());
    }
}
