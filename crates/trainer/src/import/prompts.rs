//! Prompts of sample images, with the flags that other trainers allow within them: `a fox --w 768 --h 768 --d 42`.
//! hearth has one size, one number of steps and one guidance scale for all prompts.

use serde_json::Value;

use super::family::ForeignFamily;
use super::mapping::Mapping;

/// A prompt of another trainer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SamplePrompt {
    pub text: String,
    pub negative: Option<String>,
    pub width: Option<f64>,
    pub height: Option<f64>,
    pub seed: Option<f64>,
    pub steps: Option<f64>,
    /// Classifier-free guidance.
    pub cfg_scale: Option<f64>,
    /// What a model with a guidance embedding gets.
    pub guidance: Option<f64>,
    pub references: Vec<String>,
    /// Flags that mean nothing here.
    pub ignored: Vec<String>,
}

impl SamplePrompt {
    /// A line with flags: kohya's, and those of ai-toolkit.
    pub fn parse(line: &str) -> Self {
        let mut parts = line.split(" --");
        let text = parts.next().unwrap_or_default().trim().to_owned();
        let mut prompt = Self { text, ..Self::default() };
        for part in parts {
            let (name, value) = part.split_once(char::is_whitespace).unwrap_or((part, ""));
            let value = value.trim();
            let number = value.parse::<f64>().ok().filter(|number| number.is_finite());
            match name.trim().to_lowercase().as_str() {
                "n" => prompt.negative = Some(value.into()),
                "w" => prompt.width = number,
                "h" => prompt.height = number,
                "d" | "seed" => prompt.seed = number,
                "s" | "steps" => prompt.steps = number,
                "l" | "cfg" => prompt.cfg_scale = number,
                "g" => prompt.guidance = number,
                "ci" | "ctrl_img" | "ctrl_img_1" | "ctrl_img_2" | "ctrl_img_3" => {
                    prompt.references.push(value.into());
                }
                name => prompt.ignored.push(format!("--{name}")),
            }
        }
        prompt
    }
}

/// A number that samples have if their prompt does not say otherwise, with the key it came from.
#[derive(Clone, Copy, Default)]
pub(super) struct SampleNumber<'a> {
    pub value: Option<f64>,
    pub from: &'a str,
}

/// What samples are like if a prompt does not say; nothing where hearth's default is as good.
#[derive(Clone, Copy, Default)]
pub(super) struct SampleDefaults<'a> {
    /// The key with the prompts.
    pub from: &'a str,
    pub every: SampleNumber<'a>,
    pub width: SampleNumber<'a>,
    pub height: SampleNumber<'a>,
    pub steps: SampleNumber<'a>,
    pub cfg_scale: SampleNumber<'a>,
    pub guidance: SampleNumber<'a>,
    pub seed: SampleNumber<'a>,
    pub kind: GuidanceKind,
}

/// How the guidance scale of samples counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum GuidanceKind {
    /// Classifier-free guidance; 1 is without.
    #[default]
    ClassifierFree,
    /// The model has a guidance embedding, and classifier-free guidance is apart from it.
    Embedded,
    /// 1 is without there, and 0 here: the scale is one less.
    FromOne,
    /// Counted from 0 there too, but off up to 1.
    FromZero,
}

impl GuidanceKind {
    /// That of a family, for a trainer whose Z-Image counts from 1.
    pub fn of(family: ForeignFamily) -> Self {
        match family {
            ForeignFamily::Flux => Self::Embedded,
            ForeignFamily::ZImage => Self::FromOne,
            _ => Self::ClassifierFree,
        }
    }

    /// The scale of classifier-free guidance, as hearth counts it.
    fn scale(self, scale: f64) -> f64 {
        match self {
            Self::ClassifierFree | Self::Embedded => scale.max(1.0),
            Self::FromOne => (scale - 1.0).max(0.0),
            Self::FromZero if scale > 1.0 => scale,
            Self::FromZero => 0.0,
        }
    }
}

impl<'a> SampleNumber<'a> {
    /// Of a key.
    pub fn of(value: Option<f64>, from: &'a str) -> Self {
        Self { value, from }
    }

    /// What the trainer does if no key says.
    pub fn unless_said(value: f64) -> Self {
        Self { value: Some(value), from: "" }
    }

    /// A prompt's own number stands above it.
    fn under(self, own: Option<f64>, prompts: &'a str) -> Self {
        match own {
            Some(_) => Self { value: own, from: prompts },
            None => self,
        }
    }
}

/// Sides of images are multiples of it.
const SIDE_STEP: f64 = 16.0;

/// Writes `[sample]`; nothing if there are no prompts, since nothing would be drawn.
pub(super) fn write(mapping: &mut Mapping, prompts: &[SamplePrompt], default: SampleDefaults<'_>) {
    let from = default.from;
    let Some(first) = prompts.first() else { return };
    let texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
    mapping.set("sample.prompts", texts, from);
    write_number(mapping, "sample.every", default.every, |every| {
        (every >= 1.0).then(|| Value::from(every as u64))
    });
    write_size(mapping, first, default);
    let steps = default.steps.under(first.steps, from);
    write_number(mapping, "sample.steps", steps, |steps| Some(Value::from(steps as u64)));
    let cfg_scale = default.cfg_scale.under(first.cfg_scale, from);
    let guidance = default.guidance.under(first.guidance, from);
    let counted = |scale: f64| Some(Value::from(default.kind.scale(scale)));
    if default.kind == GuidanceKind::Embedded {
        write_number(mapping, "sample.guidance_scale", guidance, counted);
        let above_1 = |scale: f64| (scale > 1.0).then(|| Value::from(scale));
        write_number(mapping, "sample.true_cfg_scale", cfg_scale, above_1);
    } else {
        let scale = if cfg_scale.value.is_some() { cfg_scale } else { guidance };
        write_number(mapping, "sample.guidance_scale", scale, counted);
    }
    let seed = default.seed.under(first.seed, from);
    write_number(mapping, "sample.seed", seed, |seed| {
        (seed >= 0.0).then(|| Value::from(seed as u64))
    });
    if let Some(negative) = first.negative.clone().filter(|negative| !negative.is_empty()) {
        mapping.set("sample.negative_prompt", negative, from);
    }
    write_references(mapping, prompts, from);
    tell_differences(mapping, prompts, from);
}

fn write_number(
    mapping: &mut Mapping,
    key: &'static str,
    number: SampleNumber<'_>,
    value: impl Fn(f64) -> Option<Value>,
) {
    match (number.value.and_then(value), number.from) {
        (None, _) => {}
        (Some(value), "") => mapping.set_default(key, value, "samples"),
        (Some(value), from) => mapping.set(key, value, from),
    }
}

fn write_size(mapping: &mut Mapping, first: &SamplePrompt, default: SampleDefaults<'_>) {
    let width = default.width.under(first.width, default.from);
    let height = default.height.under(first.height, default.from);
    let (Some(wide), Some(high)) = (width.value, height.value.or(width.value)) else { return };
    let round = |side: f64| ((side / SIDE_STEP).floor() * SIDE_STEP).max(SIDE_STEP) as u64;
    let size = vec![round(wide), round(high)];
    match (width.from, height.from) {
        ("", "") => mapping.set_default("sample.size", size, "samples"),
        (from, other) if from == other => mapping.set("sample.size", size, from),
        (from, other) => mapping.set("sample.size", size, &format!("{from}, {other}")),
    }
}

fn write_references(mapping: &mut Mapping, prompts: &[SamplePrompt], from: &str) {
    if prompts.iter().all(|prompt| prompt.references.is_empty()) {
        return;
    }
    let of = |prompt: &SamplePrompt| -> Vec<String> {
        prompt.references.iter().map(|path| mapping.places.written(path)).collect()
    };
    let paths: Vec<Vec<String>> = prompts.iter().map(of).collect();
    mapping.set("sample.references", paths, from);
}

/// What cannot be said for each prompt by itself changes the samples, not the training.
fn tell_differences(mapping: &mut Mapping, prompts: &[SamplePrompt], from: &str) {
    let is_other = |of: fn(&SamplePrompt) -> Option<f64>| {
        prompts.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]))
    };
    let is_size = is_other(|it| it.width) || is_other(|it| it.height);
    let is_rest = is_other(|it| it.steps)
        || is_other(|it| it.cfg_scale.or(it.guidance))
        || prompts.windows(2).any(|pair| pair[0].negative != pair[1].negative);
    if is_size || is_rest {
        mapping.differs(
            from,
            "all samples are drawn with the flags of the first prompt; training is the same",
        );
    }
    let mut ignored: Vec<&str> =
        prompts.iter().flat_map(|it| it.ignored.iter().map(String::as_str)).collect();
    ignored.sort_unstable();
    ignored.dedup();
    if !ignored.is_empty() {
        mapping.differs(
            from,
            format!("{} in prompts changes samples there, not here", ignored.join(", ")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_within_prompts_are_read() {
        let prompt = SamplePrompt::parse(
            "a red fox --w 768 --h 512 --d 7 --s 20 --l 4.5 --g 3.5 --n dull --ss euler",
        );
        let expected = SamplePrompt {
            text: "a red fox".into(),
            negative: Some("dull".into()),
            width: Some(768.0),
            height: Some(512.0),
            seed: Some(7.0),
            steps: Some(20.0),
            cfg_scale: Some(4.5),
            guidance: Some(3.5),
            references: Vec::new(),
            ignored: vec!["--ss".into()],
        };
        assert_eq!(prompt, expected);
        assert_eq!(SamplePrompt::parse("plain").text, "plain");
    }
}
