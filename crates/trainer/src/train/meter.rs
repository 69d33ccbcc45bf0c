//! What each phase of a run takes, measured, beside what was planned for it. Phases come again and
//! again, steps thousands of times: an event is made of one when it is the first of its name, and when
//! it took more than those before. Holes between tensors count, as they do in plans.

use std::collections::BTreeMap;

use compute::Device;

use crate::event::{Event, Phase, PlannedPhase};

/// Measures one phase after the other.
pub struct PhaseMeter {
    device: Device,
    planned: Vec<PlannedPhase>,
    /// The phase that is measured now.
    open: Option<Phase>,
    /// The most of each phase so far.
    peaks: BTreeMap<Phase, usize>,
    ended: EndedPhases,
    /// The most of the whole run so far.
    pub peak_bytes: usize,
}

/// Phases since it was last asked.
#[derive(Debug, Default, PartialEq)]
pub struct EndedPhases {
    /// What there is to tell of them.
    pub events: Vec<Event>,
    /// The most that one of them took.
    pub peak_bytes: usize,
}

impl PhaseMeter {
    /// Before the first phase.
    pub fn new(device: &Device, planned: &[PlannedPhase]) -> Self {
        let (device, planned) = (device.clone(), planned.to_vec());
        let (most, ended) = (BTreeMap::new(), EndedPhases::default());
        Self { device, planned, open: None, peaks: most, ended, peak_bytes: 0 }
    }

    /// What follows is a phase. One that was open has ended.
    pub fn begin(&mut self, phase: Phase) {
        self.close();
        self.open = Some(phase);
    }

    /// Ends the phase that is open; gives all that ended since this was last asked.
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
        // What was not planned has no memory of its own.
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
    fn a_phase_is_told_of_once_and_when_it_takes_more() {
        let device = Device::meta(DeviceKind::cpu(1), 1 << 20);
        let planned = PlannedPhase { name: Phase::train("64x32"), peak_bytes: 1000 };
        let mut meter = PhaseMeter::new(&device, &[planned]);
        let mut told = Vec::new();
        let _weights = device.alloc([64], Dtype::U8).unwrap();
        for bytes in [192, 128, 256, 256] {
            meter.begin(Phase::train("64x32"));
            drop(device.alloc([bytes], Dtype::U8).unwrap());
            meter.begin("not planned".into());
            drop(device.alloc([64], Dtype::U8).unwrap());
            let EndedPhases { events, peak_bytes } = meter.end();
            told.push((events.len(), peak_bytes));
            for event in events {
                let Event::Memory { phase, planned_bytes, peak_bytes } = event else { panic!() };
                assert_eq!((phase, planned_bytes), (Phase::train("64x32"), 1000));
                assert_eq!(peak_bytes, 64 + bytes);
            }
        }
        assert_eq!(told, [(1, 256), (0, 192), (1, 320), (0, 320)]);
        drop(device.alloc([640], Dtype::U8).unwrap());
        assert_eq!(meter.end(), EndedPhases::default());
        assert_eq!(meter.peak_bytes, 704);
    }
}
