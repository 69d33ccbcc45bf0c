//! Which operations there are, which of them fails how, and what came of it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// An operation of the undisturbed run.
#[derive(Clone, Copy)]
pub struct Operation {
    /// What is done with a file.
    name: &'static str,
    /// The part of the run it belongs to.
    phase: &'static str,
}

/// What happens at an operation, the first is 1.
#[derive(Clone, Copy)]
pub struct Fault {
    kind: &'static str,
    at: usize,
    operation: Operation,
}

const OPERATIONS: [&str; 10] =
    ["create", "open", "read", "write", "sync", "truncate", "rename", "remove", "mkdir", "chmod"];

/// Kinds of faults, and the operations that they can meet.
const KINDS: [(&str, &[&str]); 8] = [
    ("kill", &OPERATIONS),
    ("torn", &["write"]),
    ("enospc", &["create", "write", "sync", "rename", "mkdir"]),
    ("full", &["create", "write", "sync", "rename", "mkdir"]),
    ("eio", &OPERATIONS),
    ("erofs", &["create", "write", "truncate", "rename", "remove", "mkdir", "chmod"]),
    ("emfile", &["create", "open"]),
    ("eintr", &["create", "open", "read", "write", "sync", "truncate"]),
];

/// In the order of a run; then the commands.
const PHASES: [&str; 10] = [
    "begin",
    "encode",
    "train",
    "validate",
    "sample",
    "save",
    "export",
    "report",
    "hearth export",
    "hearth sample",
];

impl Fault {
    /// Whether it ends the process.
    pub fn is_kill(self) -> bool {
        is_kill(self.kind)
    }

    /// Whether files may be left that were not complete: of who was killed, or could not remove them.
    pub fn may_leave_staging(self) -> bool {
        self.is_kill() || self.operation.name == "remove"
    }

    /// That what was encoded is put aside only where the disk cannot read it.
    pub fn check_quarantine<'a>(
        self,
        cached: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<(), String> {
        let mut cached = cached.into_iter().filter(|_| self.kind != "eio");
        match cached.find(|path| path.extension().is_some_and(|end| end == "damaged")) {
            Some(path) => Err(format!("taken for damaged: {}", path.display())),
            None => Ok(()),
        }
    }
}

/// As the shim reads it.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.at)
    }
}

fn is_kill(kind: &str) -> bool {
    ["kill", "torn"].contains(&kind)
}

/// The row of a command in the table, by its words.
pub fn phase_of_command(words: &str) -> &'static str {
    let is_named =
        |phase: &&&str| phase.strip_prefix("hearth ").is_some_and(|verb| words.starts_with(verb));
    PHASES.iter().find(is_named).expect("it has a row")
}

/// The shim's log, by line: an operation, the path in the run's folder, and the start of what is written. All of a
/// command are in one phase.
pub fn read_log(log: &str, of_command: Option<&'static str>) -> Vec<Operation> {
    // Of events, whose file belongs to every phase.
    let mut last = "begin";
    let operation = |line: &str| {
        let mut parts = line.split('\t');
        let [name, path, start] = [(); 3].map(|()| parts.next().unwrap_or_default());
        let name = OPERATIONS.iter().find(|known| **known == name).expect("the shim names it so");
        if let Some(phase) = of_command {
            return Operation { name, phase };
        }
        if path.starts_with("/events.jsonl") {
            last = phase_of_event(start).unwrap_or(last);
            return Operation { name, phase: if *name == "read" { "report" } else { last } };
        }
        Operation { name, phase: phase_of_path(path) }
    };
    log.lines().map(operation).collect()
}

fn phase_of_path(path: &str) -> &'static str {
    let path = path.trim_start_matches('/');
    let phases = [
        ("cache", "encode"),
        ("samples", "sample"),
        ("checkpoints", "save"),
        ("adapter", "export"),
        ("model", "export"),
        (".model", "export"),
        ("report", "report"),
        (".report", "report"),
        ("README", "report"),
        (".README", "report"),
    ];
    phases.iter().find(|(start, _)| path.starts_with(start)).map_or("begin", |(_, phase)| phase)
}

fn phase_of_event(line: &str) -> Option<&'static str> {
    let kind = line.strip_prefix("{\"event\":\"")?.split('"').next()?;
    Some(match kind {
        "step" => "train",
        "validation" => "validate",
        "image_sample" | "text_sample" => "sample",
        "checkpoint" => "save",
        "exported" | "end" => "export",
        "phase" | "progress" => "encode",
        _ => return None,
    })
}

/// Random numbers, by Steele's splitmix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Others, which do not depend on how many are drawn here.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A kill or another fault, at one of the operations that it can meet; each phase is as likely, however many
    /// operations it has.
    pub fn fault(&mut self, operations: &[Operation], is_killed: bool) -> Fault {
        let kinds: Vec<_> = KINDS.iter().filter(|(kind, _)| is_kill(kind) == is_killed).collect();
        let (kind, meets) = kinds[self.below(kinds.len())];
        let mut by_phase = BTreeMap::<&str, Vec<usize>>::new();
        for (index, operation) in operations.iter().enumerate() {
            if meets.contains(&operation.name) {
                by_phase.entry(operation.phase).or_default().push(index);
            }
        }
        let phases: Vec<_> = by_phase.into_values().collect();
        let among = &phases[self.below(phases.len())];
        let index = among[self.below(among.len())];
        Fault { kind, at: index + 1, operation: operations[index] }
    }
}

/// Another one each time.
pub fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// What held.
pub struct Results {
    seed: u64,
    /// By phase and kind: points, and those that held.
    counts: BTreeMap<(&'static str, &'static str), [usize; 2]>,
    broken: Vec<String>,
}

impl Results {
    pub fn new(seed: u64) -> Self {
        Self { seed, counts: BTreeMap::new(), broken: Vec::new() }
    }

    /// Adds one; where the run did not come to the operation, it is no point.
    pub fn add(&mut self, fault: Fault, held: Result<bool, String>) {
        if held == Ok(false) {
            return;
        }
        let [points, n_held] = self.counts.entry((fault.operation.phase, fault.kind)).or_default();
        *points += 1;
        *n_held += usize::from(held.is_ok());
        if let Err(problem) = held {
            let broken = format!("{fault} ({}): {problem}", fault.operation.phase);
            println!("{broken}");
            self.broken.push(broken);
        }
    }

    pub fn assert_held(&self) {
        let (seed, broken) = (self.seed, self.broken.join("\n"));
        assert!(self.broken.is_empty(), "with HEARTH_TORTURE_SEED={seed}:\n{broken}");
    }
}

/// A table: phases down, kinds across, in each cell how many of how many points held.
impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |held: usize, points: usize| match points {
            0 => String::new(),
            _ if held == points => points.to_string(),
            _ => format!("{held} of {points}"),
        };
        write!(f, "| phase |")?;
        KINDS.iter().try_for_each(|(kind, _)| write!(f, " {kind} |"))?;
        writeln!(f, " points | held |\n|---|{}", "---|".repeat(KINDS.len() + 2))?;
        let mut all = [0, 0];
        for phase in PHASES {
            let mut row = [0, 0];
            write!(f, "| {phase} |")?;
            for (kind, _) in KINDS {
                let [points, held] = self.counts.get(&(phase, kind)).copied().unwrap_or_default();
                write!(f, " {} |", cell(held, points))?;
                row = [row[0] + points, row[1] + held];
            }
            writeln!(f, " {} | {} |", row[0], row[1])?;
            all = [all[0] + row[0], all[1] + row[1]];
        }
        writeln!(f, "| all |{} {} | {} |", " |".repeat(KINDS.len()), all[0], all[1])?;
        let of = |is_killed: bool| -> usize {
            let counted = self.counts.iter().filter(|((_, kind), _)| is_kill(kind) == is_killed);
            counted.map(|(_, [points, _])| points).sum()
        };
        write!(f, "{} kills, {} disk faults", of(true), of(false))
    }
}
