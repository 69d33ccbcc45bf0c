//! `hearth doctor --nodes`: whether machines can train together, and how fast the link between them is.

use std::env;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use cluster::World;
use cluster::supervisor::{
    Mpirun, Node, NodeCheck, SupervisedEnd, SupervisedJob, check_node, supervise,
};
use trainer::TrainerError;

use super::nodes;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::text::{BOLD, TextPage};

/// Which machines are looked at.
#[derive(Debug, clap::Args)]
pub struct NodeCheckArgs {
    /// Check these machines for training together: versions, and the speed of the link
    #[arg(long, value_name = "NODE,...", value_delimiter = ',', conflicts_with_all = ["machine", "record", "watch", "json", "self_test"])]
    nodes: Vec<Node>,

    /// Network between the nodes, such as 10.0.0.0/24
    #[arg(long, value_name = "NETWORK", requires = "nodes")]
    link: Option<String>,

    /// The mpirun of Open MPI or MPICH that starts the nodes
    #[arg(long, value_name = "PATH", requires = "nodes")]
    mpirun: Option<PathBuf>,

    /// What the check starts on every node
    #[arg(long, hide = true)]
    link_test: bool,
}

impl NodeCheckArgs {
    /// Checks the nodes, if any were named.
    pub fn run(&self, out: &mut dyn Write) -> Result<Option<CommandOutcome>, Failure> {
        if self.link_test {
            return test_link(out).map(Some);
        }
        if self.nodes.is_empty() {
            return Ok(None);
        }
        let mpirun = Mpirun::find(self.mpirun.as_deref()).map_err(TrainerError::from)?;
        let program = env::current_exe()?;
        let checks: Vec<NodeCheck> =
            self.nodes.iter().map(|node| check_node(node, &program, &mpirun)).collect();
        let own = format!("hearth {}", env!("CARGO_PKG_VERSION"));
        write!(out, "{}", page(&checks, &own, &mpirun.version))?;
        out.flush()?;
        if !checks.iter().all(|check| is_alike(check, &own, &mpirun.version)) {
            return Ok(Some(CommandOutcome::Differs));
        }
        let job = SupervisedJob {
            mpirun: &mpirun,
            nodes: &self.nodes,
            link: self.link.as_deref(),
            program: &program,
            arguments: &["doctor", "--link-test"].map(OsString::from),
            is_plain: true,
            is_strict: true,
        };
        let never = AtomicBool::new(false);
        let end = supervise(&job, &never, &mut |_| {}).map_err(TrainerError::from)?;
        Ok(Some(match end {
            SupervisedEnd::Failed(_) => CommandOutcome::Differs,
            SupervisedEnd::Done | SupervisedEnd::Paused => CommandOutcome::Done,
        }))
    }
}

fn is_alike(check: &NodeCheck, program: &str, mpi: &str) -> bool {
    check.program.as_deref() == Ok(program) && check.mpi.as_deref() == Ok(mpi)
}

fn page(checks: &[NodeCheck], program: &str, mpi: &str) -> String {
    let mut page = TextPage::new();
    let mut rows = vec![["node", "hearth", "MPI", "answers in", ""].map(str::to_owned)];
    let said = |answer: &Result<String, String>| answer.clone().unwrap_or_else(|problem| problem);
    for check in checks {
        let is_alike = is_alike(check, program, mpi);
        rows.push([
            check.node.clone(),
            said(&check.program),
            said(&check.mpi),
            format!("{:.2} s", check.secs),
            if is_alike { "ok".into() } else { format!("needs {program} and {mpi}") },
        ]);
    }
    page.line(BOLD, "nodes");
    page.table(&rows);
    page.finish()
}

/// As a rank: the time of the smallest exchange, and of a sum of 16 MB. The first rank prints it.
fn test_link(out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    const VALUES: usize = 4 << 20;
    let Some(world) = World::join().map_err(TrainerError::from)? else {
        return Ok(CommandOutcome::Done);
    };
    let cluster = |error| Failure::from(TrainerError::Cluster(error));
    let (mut waits, mut sums) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let begun = Instant::now();
        world.barrier().map_err(cluster)?;
        waits.push(begun.elapsed().as_secs_f64());
    }
    let mut values = vec![1.0_f32; VALUES];
    for _ in 0..5 {
        let begun = Instant::now();
        values = world.sum(values).map_err(cluster)?;
        sums.push(begun.elapsed().as_secs_f64());
    }
    let (ranks, library) = (world.size(), world.library().to_owned());
    let is_first = world.rank() == 0;
    nodes::leave(Some(world), false)?;
    if is_first {
        let least = |of: &[f64]| of.iter().copied().fold(f64::MAX, f64::min);
        let megabytes = (VALUES * size_of::<f32>()) as f64 / 1e6;
        writeln!(
            out,
            "link: {ranks} ranks by {library}, {:.2} ms to meet, {megabytes:.0} MB of gradients summed in {:.0} ms ({:.0} MB/s)",
            1e3 * least(&waits),
            1e3 * least(&sums),
            megabytes / least(&sums)
        )?;
    }
    Ok(CommandOutcome::Done)
}
