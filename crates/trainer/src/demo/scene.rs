//! What an image of the demo shows, and the words for it. Everything follows from a seed and the
//! image's number, so that a set of images is the same on every machine.

use compute::RandomSequence;

use super::shape::DemoShape;
use crate::config::data::DemoStyle;

/// What captions of [`DemoStyle::Neon`] begin with.
pub const TRIGGER: &str = "neon style";

/// The colour of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour {
    /// As captions call it.
    pub name: &'static str,
    /// Red, green and blue of a filled shape.
    pub fill: [u8; 3],
    /// The same of a glowing outline, which is brighter.
    pub glow: [u8; 3],
}

const fn colour(name: &'static str, fill: [u8; 3], glow: [u8; 3]) -> Colour {
    Colour { name, fill, glow }
}

impl Colour {
    /// All of them.
    pub const ALL: [Self; 9] = [
        colour("red", [221, 48, 46], [255, 46, 58]),
        colour("orange", [243, 137, 32], [255, 140, 30]),
        colour("yellow", [249, 205, 40], [255, 226, 60]),
        colour("green", [52, 160, 72], [50, 245, 105]),
        colour("blue", [38, 98, 214], [40, 120, 255]),
        colour("purple", [130, 64, 184], [168, 72, 255]),
        colour("pink", [240, 112, 172], [255, 96, 196]),
        colour("brown", [128, 80, 44], [196, 118, 62]),
        colour("black", [40, 40, 46], [138, 146, 168]),
    ];

    /// The one that a prompt names first.
    pub fn named(prompt: &str) -> Option<Self> {
        let mut words = prompt.split(|letter: char| !letter.is_alphanumeric());
        words.find_map(|word| Self::ALL.into_iter().find(|colour| colour.name == word))
    }
}

/// What is behind a filled shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Background {
    /// As captions call it.
    pub name: &'static str,
    /// Red, green and blue.
    pub fill: [u8; 3],
}

impl Background {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self { name: "white", fill: [251, 251, 251] },
        Self { name: "cream", fill: [253, 241, 208] },
        Self { name: "light blue", fill: [200, 227, 250] },
        Self { name: "light green", fill: [205, 240, 204] },
        Self { name: "light pink", fill: [253, 213, 225] },
        Self { name: "light grey", fill: [217, 220, 225] },
    ];
}

/// How large a shape is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeSize {
    /// A third of the image.
    Small,
    /// Half of it, which captions do not mention.
    Medium,
    /// Three quarters of it.
    Large,
}

/// Where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapePosition {
    /// In the middle, which captions do not mention.
    Centre,
    /// To the left.
    Left,
    /// To the right.
    Right,
    /// Above the middle.
    Top,
    /// Below the middle.
    Bottom,
}

impl ShapePosition {
    const ASIDE: [Self; 4] = [Self::Left, Self::Right, Self::Top, Self::Bottom];

    fn words(self) -> &'static str {
        match self {
            Self::Centre => "",
            Self::Left => " on the left",
            Self::Right => " on the right",
            Self::Top => " at the top",
            Self::Bottom => " at the bottom",
        }
    }

    /// Steps to the right and down.
    fn direction(self) -> [f32; 2] {
        match self {
            Self::Centre => [0.0, 0.0],
            Self::Left => [-1.0, 0.0],
            Self::Right => [1.0, 0.0],
            Self::Top => [0.0, -1.0],
            Self::Bottom => [0.0, 1.0],
        }
    }
}

/// An image before it is drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    /// How it is drawn.
    pub style: DemoStyle,
    /// What it shows.
    pub shape: DemoShape,
    /// In which colour.
    pub colour: Colour,
    /// On what, if the style has backgrounds.
    pub background: Background,
    /// How large.
    pub size: ShapeSize,
    /// Where.
    pub position: ShapePosition,
    /// The shape's radius, as a share of the image's side.
    pub radius: f32,
    /// The shape's middle, right and down, as shares of the image's side.
    pub centre: [f32; 2],
    /// The words for it.
    pub caption: String,
}

impl Scene {
    /// The `index`-th scene of a seed.
    pub fn new(style: DemoStyle, seed: u64, index: usize) -> Self {
        let mut dice = SceneRandom { sequence: RandomSequence::new(seed, index as u64), at: 0 };
        let shape = dice.one_of(&DemoShape::ALL);
        let colour = dice.one_of(&Colour::ALL);
        let background = dice.one_of(&Background::ALL);
        let size = dice.one_of(&[
            ShapeSize::Medium,
            ShapeSize::Medium,
            ShapeSize::Small,
            ShapeSize::Large,
        ]);
        // A large shape has no room to be anywhere else.
        let is_aside = dice.chance(0.3) && size != ShapeSize::Large;
        let aside = dice.one_of(&ShapePosition::ASIDE);
        let place = if is_aside { aside } else { ShapePosition::Centre };
        let (least, most, room) = match size {
            ShapeSize::Small => (0.16, 0.19, 0.24),
            ShapeSize::Medium => (0.24, 0.28, 0.16),
            ShapeSize::Large => (0.34, 0.38, 0.0),
        };
        let radius = least + (most - least) * dice.uniform();
        let jitter = [dice.uniform(), dice.uniform()].map(|share| (share - 0.5) * 0.03);
        let [right, down] = place.direction();
        let centre = [0.5 + room * right + jitter[0], 0.5 + room * down + jitter[1]];
        let caption = String::new();
        let mut scene = Self {
            style,
            shape,
            colour,
            background,
            size,
            position: place,
            radius,
            centre,
            caption,
        };
        scene.caption = scene.describe(&mut dice);
        scene
    }

    /// The words for it, some of which may be left out as people leave them out.
    fn describe(&self, dice: &mut SceneRandom) -> String {
        let (is_short, has_background) = (dice.chance(0.12), dice.chance(0.75));
        let (colour, shape) = (self.colour.name, self.shape.name());
        if is_short {
            return self.styled(format!("{colour} {shape}"));
        }
        let size = match self.size {
            ShapeSize::Small => "small ",
            ShapeSize::Medium => "",
            ShapeSize::Large => "large ",
        };
        let is_vowel = size.is_empty() && colour.starts_with('o');
        let article = if is_vowel { "an" } else { "a" };
        let what = format!("{article} {size}{colour} {shape}{}", self.position.words());
        if self.style == DemoStyle::Neon || !has_background {
            return self.styled(what);
        }
        let comma = if self.position == ShapePosition::Centre { "" } else { "," };
        format!("{what}{comma} on a {} background", self.background.name)
    }

    fn styled(&self, caption: String) -> String {
        match self.style {
            DemoStyle::Flat => caption,
            DemoStyle::Neon => format!("{TRIGGER}, {caption}"),
        }
    }
}

/// A stream read from its start.
struct SceneRandom {
    sequence: RandomSequence,
    at: usize,
}

impl SceneRandom {
    fn uniform(&mut self) -> f32 {
        self.at += 1;
        self.sequence.uniform(self.at - 1)
    }

    fn chance(&mut self, share: f32) -> bool {
        self.uniform() < share
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        self.at += 1;
        all[self.sequence.word(self.at - 1) as usize % all.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captions_read_well_and_differ() {
        let captions = |style, count| -> Vec<String> {
            (0..count).map(|index| Scene::new(style, 1, index).caption).collect()
        };
        let expected = expect_test::expect![[r"
            a large green circle on a light blue background
            a small orange triangle on the left, on a cream background
            a black moon on a white background
            a small blue moon on a light grey background
            blue circle
            a small pink cross
            a small pink star at the top, on a light grey background
            a small purple square on a light blue background
            neon style, a large green circle
            neon style, a small orange triangle on the left
            neon style, a black moon
            neon style, a small blue moon"]];
        let shown =
            [captions(DemoStyle::Flat, 8), captions(DemoStyle::Neon, 4)].concat().join("\n");
        expected.assert_eq(&shown);
        let mut all = captions(DemoStyle::Flat, 400);
        all.sort();
        all.dedup();
        assert!(all.len() > 300, "{}", all.len());
        assert!(all.iter().all(|caption| !caption.contains("a orange") && !caption.contains("  ")));
    }

    #[test]
    fn a_prompt_names_its_colour() {
        let named = |prompt| Colour::named(prompt).map(|colour| colour.name);
        assert_eq!(named("neon style, a small pink heart"), Some("pink"));
        assert_eq!(named("a red star on a light green background"), Some("red"));
        assert_eq!(named("a house"), None);
    }
}
