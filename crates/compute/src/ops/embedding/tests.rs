//! The embedding against its formula.

use crate::ops::gather::tests::gathered;
use crate::testing::{Input, check, device};
use crate::{Device, Dtype, Gradients, Params, RandomSequence, Tape, Var};

/// Some rows several times, some never.
const IDS: [u32; 6] = [4, 0, 4, 2, 4, 6];

#[test]
fn rows_of_the_table() {
    for width in [1, 5, 18] {
        let table = Input::normal([7, width], 1);
        check(
            &[table],
            4.0,
            &|tape, v| tape.embedding(&tape.device().upload([2, 3], &IDS)?, &v[0]),
            &|v| gathered(&v[0], &IDS, [6, 7, width]),
        );
    }
}

#[test]
fn a_gradient_that_is_there_is_added_to() {
    check(
        &[Input::normal([7, 3], 1)],
        8.0,
        &|tape, v| {
            let ids = tape.device().upload([6], &IDS)?;
            let twice = tape.embedding(&ids, &v[0])?;
            tape.add(&twice, &tape.scale(&tape.embedding(&ids, &v[0])?, 0.5)?)
        },
        &|v| gathered(&v[0], &IDS, [6, 7, 3]).into_iter().map(|row| row * 1.5).collect(),
    );
}

#[test]
fn what_keeps_it_makes_it_again() {
    let silu = crate::ops::Activation::Silu;
    check(
        &[Input::normal([7, 3], 1)],
        8.0,
        &|tape, v| {
            let ids = tape.device().upload([6], &IDS)?;
            tape.activate(&tape.embedding(&ids, &v[0])?, silu)
        },
        &|v| {
            let rows = gathered(&v[0], &IDS, [6, 7, 3]).into_iter();
            rows.map(|x| crate::ops::activation::tests::exact(silu, x)).collect()
        },
    );
}

/// The gradient of a table of 300 rows of 70, each used about thirty times.
fn trained(device: &Device) -> Vec<u32> {
    let (rows, width, uses) = (300, 70, 9000);
    let mut params = Params::default();
    let table = params
        .add(device.normal([rows, width], Dtype::Bf16, 1.0, RandomSequence::new(1, 0)).unwrap());
    let ids: Vec<u32> = (0..uses as u32).map(|index| index * index % rows as u32).collect();
    let ids = device.upload([uses], &ids).unwrap();
    let mut gradients = Gradients::default();
    for _ in 0..2 {
        let tape = Tape::training(device, &params, 0);
        let y = tape.embedding(&ids, &tape.param(table)).unwrap();
        let loss = tape.mse(&y, &device.zeros(y.shape(), Dtype::F32).unwrap(), None, None).unwrap();
        tape.backward(&loss, &mut gradients).unwrap();
    }
    let gradient = gradients.get(table).unwrap();
    assert_eq!(gradient.dtype(), Dtype::F32);
    let mut used = vec![0.0; rows];
    ids.to_vec::<u32>().iter().for_each(|id| used[*id as usize] += 1.0);
    let values = params.get(table).to_f32_vec();
    let expected = values.iter().enumerate().map(|(index, value)| {
        2.0 * f64::from(*value) * 2.0 / (uses * width) as f64 * used[index / width]
    });
    let expected: Vec<f64> = expected.collect();
    let gradient = gradient.to_vec::<f32>();
    // The gradient that reaches the embedding is rounded to the table's dtype.
    crate::testing::compare("gradient", &gradient, &expected, 1e-2);
    gradient.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_parameters_gradient_is_in_f32_and_the_same_on_any_number_of_threads() {
    let [one, two, three] =
        [1, 2, 3].map(|threads| trained(&Device::cpu(threads, 1 << 26).unwrap()));
    assert_eq!(one, two);
    assert_eq!(one, three);
}

#[test]
fn nothing_gives_nothing() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let none = device.zeros([2, 0], Dtype::U32).unwrap();
    for shape in [[0, 3], [4, 3], [4, 0]] {
        let table = Var::from(device.zeros(shape, Dtype::F16).unwrap());
        let y = tape.embedding(&none, &table).unwrap();
        assert_eq!((y.shape(), y.dtype()), ([2, 0, shape[1]].into(), Dtype::F16));
    }
}

#[test]
fn what_does_not_fit_is_said_with_both_values() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let table = Var::from(device.zeros([5, 2], Dtype::F32).unwrap());
    let ids = device.upload([3], &[1u32, 5, 9]).unwrap();
    let error = tape.embedding(&ids, &table).err().unwrap().to_string();
    assert_eq!(error, "embedding: index 5 is out of range, there are 5 rows in the table");
    let error = tape.embedding(table.tensor(), &table).err().unwrap().to_string();
    assert_eq!(error, "embedding: ids is f32, expected u32");
    let error = tape.embedding(&ids, &table.reshape([10])).err().unwrap().to_string();
    assert_eq!(error, "embedding: table of shape [10] has 1 dimensions, expected 2");
    let deep = device.zeros([1, 1, 1, 1, 2], Dtype::U32).unwrap();
    let error = tape.embedding(&deep, &table).err().unwrap().to_string();
    assert_eq!(error, "embedding: ids of shape [1, 1, 1, 1, 2] has 5 dimensions, expected 4");
}
