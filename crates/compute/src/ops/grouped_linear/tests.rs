//! Groups of rows times weights of their own, against the sums written out.

use crate::ops::RowGroups;
use crate::ops::linear::Weight;
use crate::testing::{Dual, Input, check, device};
use crate::{Dtype, Params, Result, Tape, Var};

/// Rows, inputs and outputs; the sizes of groups.
struct Case {
    sizes: [usize; 2],
    groups: Vec<usize>,
}

impl Case {
    fn inputs(&self) -> Vec<Input> {
        let ([inputs, outputs], rows) = (self.sizes, self.groups.iter().sum());
        let weight = |seed: usize| Input::normal([outputs, inputs], 2 + seed as u64);
        [Input::normal([rows, inputs], 1)]
            .into_iter()
            .chain((0..self.groups.len()).map(weight))
            .collect()
    }

    fn op(&self, tape: &Tape<'_>, v: &[Var]) -> Result<Var> {
        let weights: Vec<Weight<'_>> = v[1..].iter().map(Into::into).collect();
        tape.grouped_linear(&v[0], &RowGroups::new(self.groups.clone()), &weights)
    }

    fn exact(&self, v: &[Vec<Dual>]) -> Vec<Dual> {
        let [inputs, _] = self.sizes;
        let mut rows = v[0].chunks(inputs);
        let mut y = Vec::new();
        for (group, n) in self.groups.iter().enumerate() {
            for row in rows.by_ref().take(*n) {
                for weight in v[1 + group].chunks(inputs) {
                    let terms = row.iter().zip(weight).map(|(a, b)| *a * *b);
                    y.push(terms.reduce(|a, b| a + b).unwrap());
                }
            }
        }
        y
    }
}

#[test]
fn each_group_has_a_weight_of_its_own() {
    for groups in [vec![3, 0, 2], vec![0, 5], vec![1, 1, 1, 7]] {
        let case = Case { sizes: [6, 5], groups };
        check(&case.inputs(), 4.0, &|tape, v| case.op(tape, v), &|v| case.exact(v));
    }
}

#[test]
fn a_frozen_weight_passes_gradients_on() {
    let case = Case { sizes: [4, 3], groups: vec![2, 3] };
    let [x, first, second] = <[Input; 3]>::try_from(case.inputs()).ok().unwrap();
    let inputs = [x, first.frozen(), second];
    check(&inputs, 4.0, &|tape, v| case.op(tape, v), &|v| case.exact(v));
}

#[test]
fn what_does_not_fit_is_said() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: [usize; 2]| Var::from(device.zeros(sizes, Dtype::F32).unwrap());
    let says = |rows: usize, groups: Vec<usize>, weights: &[Var]| {
        let weights: Vec<Weight<'_>> = weights.iter().map(Into::into).collect();
        let groups = RowGroups::new(groups);
        tape.grouped_linear(&zeros([rows, 4]), &groups, &weights).err().unwrap().to_string()
    };
    let weights = [zeros([3, 4]), zeros([3, 4])];
    let said = says(5, vec![5], &weights);
    assert_eq!(said, "grouped_linear: groups has shape [1], expected [2]");
    let said = says(5, vec![2, 2], &weights);
    assert_eq!(said, "grouped_linear: rows of groups has shape [4], expected [5]");
    let said = says(4, vec![2, 2], &[zeros([3, 4]), zeros([2, 4])]);
    assert_eq!(said, "grouped_linear: weight has shape [2, 4], expected [3, 4]");
}
