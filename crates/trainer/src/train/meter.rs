//! The measured memory peak of each phase, beside the planned one. Phases repeat, steps thousands of times: an
//! event is emitted for the first of a name, and when one takes more than those before. Fragmentation counts,
//! as it does in plans.

use std::collections::BTreeMap;

use compute::Device;

use crate::event::{Event, Phase, PlannedPhase};

/// Measures one phase after the other.
pub struct PhaseMeter {
    device: Device,
    planned: Vec<PlannedPhase>,
    /// The phase being measured.
    open: Option<Phase>,
    /// The peak of each phase so far.
    peaks: BTreeMap<Phase, usize>,
    ended: EndedPhases,
    /// The peak of the whole run so far.
    pub peak_bytes: usize,
}

/// Phases since the last call.
#[derive(Debug, Default, PartialEq)]
pub struct EndedPhases {
    /// Events about them.
    pub events: Vec<Event>,
    /// The highest of their peaks.
    pub peak_bytes: usize,
}

impl PhaseMeter {
    /// Before the first phase.
    pub fn new(device: &Device, planned: &[PlannedPhase]) -> Self {
        let (device, planned) = (device.clone(), planned.to_vec());
        let (peaks, ended) = (BTreeMap::new(), EndedPhases::default());
        Self { device, planned, open: None, peaks, ended, peak_bytes: 0 }
    }

    /// Begins a phase; ends the open one.
    pub fn begin(&mut self, phase: Phase) {
        self.close();
        self.open = Some(phase);
    }

    /// Ends the open phase; returns all that ended since the last call.
    pub fn end(&mut self) -> EndedPhases {
        self.close();
        std::mem::take(&mut self.ended)
    }

    fn close(&mut self) {
        let peak_bytes = self.device.usage().extent;
        self.device.reset_peak();
        self.peak_bytes = self.peak_bytes.max(peak_bytes);
        let Some(phase) = self.open.take() else { return };
        self.ended.peak_bytes = self.ended.peak_bytes.max(peak_bytes);
        if self.peaks.get(&phase).is_some_and(|most| *most >= peak_bytes) {
            return;
        }
        self.peaks.insert(phase.clone(), peak_bytes);
        // A phase that is not in the plan uses no device memory.
        if let Some(planned) = self.planned.iter().find(|planned| planned.name == phase) {
            let planned_bytes = planned.peak_bytes;
            self.ended.events.push(Event::Memory { phase, planned_bytes, peak_bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use compute::{DeviceKind, Dtype};

    use super::*;

    #[test]
    fn a_phase_is_emitted_once_and_when_it_takes_more() {
        let device = Device::meta(DeviceKind::cpu(1), 1 << 20);
        let planned = PlannedPhase { name: Phase::train("64x32"), peak_bytes: 1000 };
        let mut meter = PhaseMeter::new(&device, &[planned]);
        let mut emitted = Vec::new();
        let _weights = device.alloc([64], Dtype::U8).unwrap();
        for bytes in [192, 128, 256, 256] {
            meter.begin(Phase::train("64x32"));
            drop(device.alloc([bytes], Dtype::U8).unwrap());
            meter.begin("not planned".into());
            drop(device.alloc([64], Dtype::U8).unwrap());
            let EndedPhases { events, peak_bytes } = meter.end();
            emitted.push((events.len(), peak_bytes));
            for event in events {
                let Event::Memory { phase, planned_bytes, peak_bytes } = event else { panic!() };
                assert_eq!((phase, planned_bytes), (Phase::train("64x32"), 1000));
                assert_eq!(peak_bytes, 64 + bytes);
            }
        }
        assert_eq!(emitted, [(1, 256), (0, 192), (1, 320), (0, 320)]);
        drop(device.alloc([640], Dtype::U8).unwrap());
        assert_eq!(meter.end(), EndedPhases::default());
        assert_eq!(meter.peak_bytes, 704);
    }
}
