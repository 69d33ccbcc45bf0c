//! Memory over time: what a device held after each change, and the op that was running. Recorded only on
//! request. Charts are drawn from it elsewhere.

use crate::Tag;

/// What a device held at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySnapshot {
    /// Bytes in use by [`Tag`].
    pub by_tag: [usize; Tag::ALL.len()],
    /// The op at work: in the backward pass, the one whose gradient is passed on. Empty before the first.
    pub op: &'static str,
}

impl MemorySnapshot {
    /// Bytes of all tags.
    pub fn bytes(&self) -> usize {
        self.by_tag.iter().sum()
    }
}

/// What a device held from one point in time to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryRecording {
    /// One at the start and one after each change, in order.
    pub snapshots: Vec<MemorySnapshot>,
    /// What was done from a moment on, in order.
    pub marks: Vec<(usize, &'static str)>,
    op: &'static str,
}

impl MemoryRecording {
    pub(crate) fn begin(by_tag: [usize; Tag::ALL.len()]) -> Self {
        Self { snapshots: vec![MemorySnapshot { by_tag, op: "" }], ..Self::default() }
    }

    pub(crate) fn push_snapshot(&mut self, by_tag: [usize; Tag::ALL.len()]) {
        self.snapshots.push(MemorySnapshot { by_tag, op: self.op });
    }

    /// Names the op to which changes belong from now on.
    pub(crate) fn enter(&mut self, op: &'static str) {
        self.op = op;
    }

    /// The next change is the first of `name`.
    pub(crate) fn mark(&mut self, name: &'static str) {
        self.marks.push((self.snapshots.len(), name));
    }

    /// About `n` moments that look the same: the fullest of each slice, so that no peak is lost. No
    /// slice reaches over a mark.
    #[must_use]
    pub fn downsampled(&self, n: usize) -> Self {
        let size = self.snapshots.len().div_ceil(n.max(1)).max(1);
        let mut thinned = Self { op: self.op, ..Self::default() };
        let marks = self.marks.iter().map(|(at, name)| (*at, Some(*name)));
        let mut from = 0;
        for (to, name) in marks.chain([(self.snapshots.len(), None)]) {
            let slices = self.snapshots[from..to].chunks(size);
            let fullest = slices.filter_map(|slice| slice.iter().max_by_key(|of| of.bytes()));
            thinned.snapshots.extend(fullest);
            thinned.marks.extend(name.map(|name| (thinned.snapshots.len(), name)));
            from = to;
        }
        thinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Linear;
    use crate::random::TestRng;
    use crate::testing::device;
    use crate::{Device, Dtype, Gradients, Params, Tape};

    /// Of so many changes, with a peak in the middle.
    fn recording(changes: usize) -> MemoryRecording {
        let mut random = TestRng::new(7);
        let mut recording = MemoryRecording::begin([0; 7]);
        for change in 0..changes {
            let bytes = if change == changes / 2 { 5000 } else { random.below(4000) };
            recording.push_snapshot([100, 0, 0, 0, 0, bytes, 0]);
        }
        recording
    }

    fn peak(moments: &[MemorySnapshot]) -> usize {
        moments.iter().map(MemorySnapshot::bytes).max().unwrap()
    }

    #[test]
    fn thinned_moments_keep_the_peak_and_the_marks() {
        let mut whole = recording(10_007);
        whole.marks = vec![(1, "forward"), (7001, "backward"), (10_005, "update")];
        let thin = whole.downsampled(600);
        assert!((590..=610).contains(&thin.snapshots.len()), "{}", thin.snapshots.len());
        assert_eq!(peak(&thin.snapshots), 5100);
        let names: Vec<_> = thin.marks.iter().map(|(_, name)| *name).collect();
        assert_eq!(names, ["forward", "backward", "update"]);
        // The fullest moment of each part is still in its part.
        let of_parts = |of: &MemoryRecording| {
            let ends = of.marks.iter().skip(1).map(|(at, _)| *at).chain([of.snapshots.len()]);
            let parts = of.marks.iter().zip(ends).map(|((from, _), to)| *from..to);
            parts.map(|part| peak(&of.snapshots[part])).collect::<Vec<_>>()
        };
        assert_eq!(of_parts(&thin), of_parts(&whole));
    }

    #[test]
    fn few_moments_are_all_kept() {
        let whole = recording(50);
        assert_eq!(whole.downsampled(600), whole);
        assert_eq!(MemoryRecording::default().downsampled(600).snapshots, []);
        assert_eq!(recording(50).downsampled(0).snapshots.len(), 1);
    }

    /// A small step, recorded.
    fn record(device: &Device) -> MemoryRecording {
        let mut params = Params::default();
        let key = params.add(device.zeros([64, 64], Dtype::F32).unwrap());
        let x = device.upload([64, 64], &[1.0f32; 4096]).unwrap();
        device.reset_peak();
        device.start_recording();
        device.mark("forward");
        let tape = Tape::training(device, &params, 0);
        let y = tape.linear(&x.clone().into(), Linear::new(&tape.param(key))).unwrap();
        let loss = tape.mse(&y, &x, None, None).unwrap();
        drop(y);
        device.mark("backward");
        tape.backward(&loss, &mut Gradients::default()).unwrap();
        device.stop_recording()
    }

    #[test]
    fn every_change_is_there_with_its_op() {
        let real = device();
        let recorded = record(&real);
        assert_eq!(peak(&recorded.snapshots), real.usage().peak);
        assert_eq!(recorded.snapshots[0].op, "");
        let ops = |from: usize, to: usize| {
            let mut ops: Vec<_> =
                recorded.snapshots[from..to].iter().map(|moment| moment.op).collect();
            ops.dedup();
            ops
        };
        let back = recorded.marks[1].0;
        assert_eq!(recorded.marks, [(1, "forward"), (back, "backward")]);
        assert_eq!(ops(1, back), ["linear", "mse"]);
        assert!(ops(back, recorded.snapshots.len()).ends_with(&["mse", "linear"]));
        assert_eq!(record(&Device::meta(real.kind(), 1 << 30)), recorded);
        assert_eq!(real.stop_recording(), MemoryRecording::default());
    }
}
