//! The remedy of each error. Those of an error with a room of its own stand there.

use std::borrow::Cow;

use weights::error::io_hint;

use super::TrainerError;

impl TrainerError {
    /// The remedy.
    pub fn hint(&self) -> Cow<'static, str> {
        let fixed = match self {
            Self::TooLarge { remedy: Some(remedy), .. } => return remedy.to_string().into(),
            Self::NotFetched { name, .. } => {
                return format!("`hearth fetch {name}` downloads it; or check the path").into();
            }
            Self::PartlyFetched { name, .. } => {
                return format!("`hearth fetch {name}` goes on where it stopped").into();
            }
            Self::Compute(error) => error.hint(),
            Self::Weights(error) => error.hint(),
            Self::Cluster(error) => error.hint(),
            Self::OtherRank { .. } => "see what it printed and wrote to ranks/ in its run's folder",
            Self::RanksDiffer { .. } => {
                "give all ranks the same program, job, model and data; keys that a plan chooses can \
                 be set in the job"
            }
            Self::Job(error) => return error.hint(),
            Self::Import(error) => return error.hint(),
            Self::Tokenizer(error) => error.hint(),
            Self::ChatTemplate { .. } => {
                "fetch the file again, from the model's maker; or remove its chat template to use ChatML"
            }
            Self::Reward { .. } => REWARD_HINT,
            Self::Io { source, .. } => io_hint(source),
            Self::Config { .. } => "fetch the file again, or correct the value it names",
            Self::Folder { .. } => {
                "give the folder that has model_index.json, with transformer, vae, text_encoder* and \
                 tokenizer* in it"
            }
            Self::MissingParts { .. } => {
                "name them with --vae, --text-encoder and --rest (base.vae, base.text_encoders, base.rest), or \
                 put them where ComfyUI has them; --rest is a diffusers folder, or one with tokenizers alone"
            }
            Self::NoTarget { .. } => {
                "name layers by the end of their names, or many by `attention` or `all`; leave the key out for \
                 the default ones"
            }
            Self::OversizedModel { .. } | Self::TensorNames { .. } | Self::ShapeMismatch { .. } => {
                "fetch config.json and the weights again, from the same model"
            }
            Self::Adapter { .. } => "use an adapter that was trained for this model",
            Self::NotFinite { .. } => {
                "its training diverged: use another, or train it again with a lower learning rate; \
                 `hearth export --force` takes it as it is"
            }
            Self::OutputLost { .. } => {
                "look for weights that are not finite with `hearth inspect --values`; without any, compute with --dtype \
                 bf16 or f32, or leave out the adapter"
            }
            Self::Checkpoint { .. } => {
                "no other checkpoint is left: start a new run with another --out"
            }
            Self::FolderBusy { .. } => "wait for it, or choose another --out",
            Self::RunNotActive { .. } => {
                "a run is asked while it works: continue it with `hearth train JOB --resume`"
            }
            Self::FolderTaken { .. } => "continue it with --resume, or choose another --out",
            Self::FolderGone { .. } => {
                "move it back, or give --out its new place, and continue with --resume from its last checkpoint"
            }
            Self::ForeignFile { .. } => "choose another --out, or move it away first",
            Self::NoRun { .. } => "start one without --resume, or give --out the folder of a run",
            Self::NoCheckpoint { was_saved: false, .. } => {
                "start again without --resume: it was stopped before it saved anything"
            }
            Self::NoCheckpoint { was_saved: true, .. } => {
                "put its checkpoints folder back, or start a new run with another --out"
            }
            Self::StepsBeyondJob { .. } => {
                "ask for more with --steps N, or start a new run with another --out"
            }
            Self::NoGradients { .. } => {
                "raise optimizer.learning_rate, or name other adapter.targets"
            }
            Self::Event { .. } => {
                "use the hearth that wrote the file; if the line was changed, restore or remove it"
            }
            Self::Cache { .. } => "run it again: what the cache has lost is encoded again",
            Self::Request { hint, .. }
            | Self::OtherJob { hint, .. }
            | Self::WrongModel { hint, .. } => hint,
            Self::OutOfMemory { .. } => {
                "continue with --resume and a higher --limit; or start again with smaller images, a lower \
                 adapter.rank or quantised weights"
            }
            Self::HalfUpdated { .. } => HALF_UPDATED_HINT,
            Self::FailedSelfTest { .. } => {
                "use --device cpu; after a system update run `hearth doctor --self-test` again; please report what it \
                 prints"
            }
            Self::GpuLost { .. } => {
                "continue with --resume, with the display asleep and other programs closed, or with --device cpu; \
                 `hearth doctor --self-test` finds kernels that this GPU computes wrongly"
            }
            Self::DecodingTooLarge { .. } => "scale the image down, leave it out, or raise --limit",
            Self::TooLarge { remedy: None, .. } => "raise --limit, or close other programs",
        };
        fixed.into()
    }
}

const REWARD_HINT: &str = "correct preference.reward, or raise preference.reward_timeout if it is slow, and continue \
                           with --resume; docs/preferences.md has a program to begin with";

const HALF_UPDATED_HINT: &str = "continue from the last checkpoint with --resume and a higher --limit, or with --set \
                                 train.recompute=block";
