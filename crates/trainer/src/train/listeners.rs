//! Who listens to a run for its own folder's sake: the report that is rewritten now and then, and the files for
//! TensorBoard if they were asked for.

use cluster::World;

use super::data_parallel::is_first;
use super::folder::RunFolder;
use crate::config::RunConfig;
use crate::error::Result;
use crate::event::EventRecord;
use crate::event::tensorboard::TensorBoardLog;
use crate::report::live::LiveReport;

/// Writes into a run's folder what its events are worth.
pub struct OwnListeners {
    report: LiveReport,
    tensorboard: Option<TensorBoardLog>,
}

impl OwnListeners {
    /// Of a job; of several ranks the first writes for TensorBoard.
    pub fn begin(folder: &RunFolder, config: &RunConfig, world: Option<&World>) -> Result<Self> {
        let is_logged = config.output.tensorboard && is_first(world);
        let tensorboard = is_logged.then(|| TensorBoardLog::new(&folder.path)).transpose()?;
        Ok(Self { report: LiveReport::begin(folder.path.clone()), tensorboard })
    }

    /// Writes what an event is worth.
    pub fn observe(&self, record: &EventRecord) {
        self.report.observe(&record.event);
        if let Some(log) = &self.tensorboard {
            log.observe(record);
        }
    }
}
