//! How good a run's model is beside its base: perplexity of texts, and questions answered right. `hearth evaluate` writes it into
//! the run's folder.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::after_run;
use crate::error::Result;

/// What the file is called in a run's folder.
pub const FILE_NAME: &str = "evaluation.json";

/// What was measured of a run, before and after.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunEvaluation {
    /// The texts, as they were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub texts: Option<PathBuf>,
    /// The questions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub questions: Option<PathBuf>,
    /// The base alone.
    pub base: EvaluationScores,
    /// With the run's adapter.
    pub adapter: EvaluationScores,
}

/// How good a model is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationScores {
    /// Of texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub texts: Option<TextScore>,
    /// Of questions with choices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choices: Option<ChoiceScore>,
    /// Of questions with one answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<RightShare>,
}

/// How well texts are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextScore {
    /// Tokens that were predicted.
    pub n_tokens: u64,
    /// Their mean cross entropy.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// The same for each byte of the text, which does not depend on the tokenizer.
    pub bits_per_byte: f64,
}

/// How often the right choice is the likeliest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChoiceScore {
    /// By the probability of the whole choice.
    pub accuracy: RightShare,
    /// By the probability for each byte of it, which is fair to long ones.
    pub accuracy_by_length: RightShare,
}

/// How many of some questions were answered right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RightShare {
    /// Questions.
    pub n: usize,
    /// The share of right answers.
    pub share: f64,
    /// The standard error of the share.
    pub standard_error: f64,
}

impl RightShare {
    /// Of questions that were answered right, or not.
    pub fn of(right: &[bool]) -> Self {
        let n = right.len();
        let share = right.iter().filter(|right| **right).count() as f64 / n as f64;
        let standard_error = (share * (1.0 - share) / n.saturating_sub(1).max(1) as f64).sqrt();
        Self { n, share, standard_error }
    }
}

impl RunEvaluation {
    /// Reads that of a run; none if it has none.
    pub fn read(run_folder: &Path) -> Result<Option<Self>> {
        let remedy = "remove it, or measure again with `hearth evaluate`";
        after_run::read(run_folder.join(FILE_NAME), remedy)
    }

    /// Writes it, in the place of the one before.
    pub fn write(&self, run_folder: &Path) -> Result<PathBuf> {
        let path = run_folder.join(FILE_NAME);
        after_run::write(&path, self)?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_written_and_damage_is_told() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(RunEvaluation::read(folder.path()).unwrap(), None);
        let texts = TextScore { n_tokens: 7, loss: 0.1, perplexity: 1.1, bits_per_byte: 0.3 };
        let exact_match = Some(RightShare::of(&[true, false, true]));
        let base = EvaluationScores { texts: Some(texts), choices: None, exact_match };
        let evaluation =
            RunEvaluation { texts: Some("a.txt".into()), base, ..RunEvaluation::default() };
        let path = evaluation.write(folder.path()).unwrap();
        assert_eq!(RunEvaluation::read(folder.path()).unwrap(), Some(evaluation));
        std::fs::write(path, "{}").unwrap();
        let error = RunEvaluation::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains(FILE_NAME) && error.contains("base"), "{error}");
    }
}
