//! Memory over time: what a device held after each change, and the op that was at work. Kept only
//! while somebody asked for it, so a run that nobody looks at pays nothing. Pictures are made of it
//! elsewhere.

use crate::Tag;

/// What a device held at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Bytes in use by [`Tag`].
    pub by_tag: [usize; Tag::ALL.len()],
    /// The op at work: on the way back, the one whose gradient is passed on. Empty before the first.
    pub op: &'static str,
}

impl Moment {
    /// Bytes of all tags.
    pub fn bytes(&self) -> usize {
        self.by_tag.iter().sum()
    }
}

/// What a device held from one point in time to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// One at the start and one after each change, in order.
    pub moments: Vec<Moment>,
    /// What was done from a moment on, in order.
    pub marks: Vec<(usize, &'static str)>,
    op: &'static str,
}

impl Recording {
    pub(crate) fn begin(by_tag: [usize; Tag::ALL.len()]) -> Self {
        Self { moments: vec![Moment { by_tag, op: "" }], ..Self::default() }
    }

    pub(crate) fn note(&mut self, by_tag: [usize; Tag::ALL.len()]) {
        self.moments.push(Moment { by_tag, op: self.op });
    }

    /// Names the op to which changes belong from now on.
    pub(crate) fn enter(&mut self, op: &'static str) {
        self.op = op;
    }

    /// The next change is the first of `name`.
    pub(crate) fn mark(&mut self, name: &'static str) {
        self.marks.push((self.moments.len(), name));
    }

    /// About `n` moments that look the same: the fullest of each slice, so that no peak is lost. No
    /// slice reaches over a mark.
    #[must_use]
    pub fn thinned(&self, n: usize) -> Self {
        let size = self.moments.len().div_ceil(n.max(1)).max(1);
        let mut thinned = Self { op: self.op, ..Self::default() };
        let marks = self.marks.iter().map(|(at, name)| (*at, Some(*name)));
        let mut from = 0;
        for (to, name) in marks.chain([(self.moments.len(), None)]) {
            let slices = self.moments[from..to].chunks(size);
            let fullest = slices.filter_map(|slice| slice.iter().max_by_key(|of| of.bytes()));
            thinned.moments.extend(fullest);
            thinned.marks.extend(name.map(|name| (thinned.moments.len(), name)));
            from = to;
        }
        thinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Linear;
    use crate::random::Random;
    use crate::testing::device;
    use crate::{Device, Dtype, Gradients, Params, Tape};

    /// Of so many changes, with a peak in the middle.
    fn recording(changes: usize) -> Recording {
        let mut random = Random::new(7);
        let mut recording = Recording::begin([0; 7]);
        for change in 0..changes {
            let bytes = if change == changes / 2 { 5000 } else { random.below(4000) };
            recording.note([100, 0, 0, 0, 0, bytes, 0]);
        }
        recording
    }

    fn peak(moments: &[Moment]) -> usize {
        moments.iter().map(Moment::bytes).max().unwrap()
    }

    #[test]
    fn thinned_moments_keep_the_peak_and_the_marks() {
        let mut whole = recording(10_007);
        whole.marks = vec![(1, "forward"), (7001, "backward"), (10_005, "update")];
        let thin = whole.thinned(600);
        assert!((590..=610).contains(&thin.moments.len()), "{}", thin.moments.len());
        assert_eq!(peak(&thin.moments), 5100);
        let names: Vec<_> = thin.marks.iter().map(|(_, name)| *name).collect();
        assert_eq!(names, ["forward", "backward", "update"]);
        // The fullest moment of each part is still in its part.
        let of_parts = |of: &Recording| {
            let ends = of.marks.iter().skip(1).map(|(at, _)| *at).chain([of.moments.len()]);
            let parts = of.marks.iter().zip(ends).map(|((from, _), to)| *from..to);
            parts.map(|part| peak(&of.moments[part])).collect::<Vec<_>>()
        };
        assert_eq!(of_parts(&thin), of_parts(&whole));
    }

    #[test]
    fn few_moments_are_all_kept() {
        let whole = recording(50);
        assert_eq!(whole.thinned(600), whole);
        assert_eq!(Recording::default().thinned(600).moments, []);
        assert_eq!(recording(50).thinned(0).moments.len(), 1);
    }

    /// A small step, recorded.
    fn record(device: &Device) -> Recording {
        let mut params = Params::default();
        let key = params.add(device.zeros([64, 64], Dtype::F32).unwrap());
        let x = device.upload([64, 64], &[1.0f32; 4096]).unwrap();
        device.restart_peak();
        device.record();
        device.mark("forward");
        let tape = Tape::training(device, &params, 0);
        let y = tape.linear(&x.clone().into(), Linear::new(&tape.param(key))).unwrap();
        let loss = tape.mse(&y, &x, None, None).unwrap();
        drop(y);
        device.mark("backward");
        tape.backward(&loss, &mut Gradients::default()).unwrap();
        device.recorded()
    }

    #[test]
    fn every_change_is_there_with_its_op() {
        let real = device();
        let recorded = record(&real);
        assert_eq!(peak(&recorded.moments), real.usage().peak);
        assert_eq!(recorded.moments[0].op, "");
        let ops = |from: usize, to: usize| {
            let mut ops: Vec<_> =
                recorded.moments[from..to].iter().map(|moment| moment.op).collect();
            ops.dedup();
            ops
        };
        let back = recorded.marks[1].0;
        assert_eq!(recorded.marks, [(1, "forward"), (back, "backward")]);
        assert_eq!(ops(1, back), ["linear", "mse"]);
        assert!(ops(back, recorded.moments.len()).ends_with(&["mse", "linear"]));
        assert_eq!(record(&Device::meta(real.kind(), 1 << 30)), recorded);
        assert_eq!(real.recorded(), Recording::default());
    }
}
