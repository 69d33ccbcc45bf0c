//! Images as tokens and back against the definition.

use super::PatchOrder;
use crate::testing::{Input, check_forward, device};
use crate::{Dtype, Params, Shape, Tape, Var};

/// For each number of the tokens, where it lies in the images.
fn places(
    [samples, channels, height, width]: [usize; 4],
    patch: usize,
    order: PatchOrder,
) -> Vec<usize> {
    let mut places = Vec::new();
    let pixels = || (0..patch).flat_map(|i| (0..patch).map(move |j| (i, j)));
    for sample in 0..samples {
        for (down, across) in
            (0..height / patch).flat_map(|i| (0..width / patch).map(move |j| (i, j)))
        {
            let at = |channel: usize, (row, column): (usize, usize)| {
                let (row, column) = (down * patch + row, across * patch + column);
                ((sample * channels + channel) * height + row) * width + column
            };
            match order {
                PatchOrder::ChannelsFirst => places.extend(
                    (0..channels).flat_map(|channel| pixels().map(move |pixel| at(channel, pixel))),
                ),
                PatchOrder::ChannelsLast => places.extend(
                    pixels().flat_map(|pixel| (0..channels).map(move |channel| at(channel, pixel))),
                ),
            }
        }
    }
    places
}

const ORDERS: [PatchOrder; 2] = [PatchOrder::ChannelsFirst, PatchOrder::ChannelsLast];

#[test]
fn every_number_finds_its_place_and_back() {
    for (shape, patch) in [([2, 3, 4, 6], 2), ([1, 2, 6, 9], 3), ([3, 5, 2, 3], 1)] {
        let [samples, channels, height, width] = shape;
        for order in ORDERS {
            let places = places(shape, patch, order);
            check_forward(
                &[Input::normal(shape, 1)],
                0.0,
                &|tape, v| tape.patchify(&v[0], patch, order),
                &|v| places.iter().map(|place| v[0][*place]).collect(),
            );
            let tokens = [samples, height / patch * (width / patch), channels * patch * patch];
            check_forward(
                &[Input::normal(tokens, 1)],
                0.0,
                &|tape, v| tape.unpatchify(&v[0], [height, width], patch, order),
                &|v| {
                    let mut image = v[0].clone();
                    places.iter().zip(&v[0]).for_each(|(place, number)| image[*place] = *number);
                    image
                },
            );
        }
    }
}

/// A clip's tokens are those of its frames, one after the other.
#[test]
fn clips_are_cut_up_frame_by_frame() {
    for (shape, patch) in [([2, 3, 3, 4, 6], 2), ([1, 5, 2, 6, 3], 3), ([2, 2, 5, 2, 3], 1)] {
        let [samples, channels, frames, height, width] = shape;
        for order in ORDERS {
            // Of one sample's frame, where the numbers lie among those of the clip.
            let of_frame = places([1, channels, height, width], patch, order);
            let plane = height * width;
            let frame_of = |sample: usize, frame: usize| {
                let place = move |place: &usize| {
                    let (channel, pixel) = (place / plane, place % plane);
                    ((sample * channels + channel) * frames + frame) * plane + pixel
                };
                of_frame.iter().map(place)
            };
            let each = (0..samples).flat_map(|s| (0..frames).map(move |f| (s, f)));
            let places: Vec<usize> = each.flat_map(|(s, f)| frame_of(s, f)).collect();
            check_forward(
                &[Input::normal(Shape::new(&shape), 1)],
                0.0,
                &|tape, v| tape.patchify(&v[0], patch, order),
                &|v| places.iter().map(|place| v[0][*place]).collect(),
            );
            let n_tokens = frames * (height / patch) * (width / patch);
            check_forward(
                &[Input::normal([samples, n_tokens, channels * patch * patch], 1)],
                0.0,
                &|tape, v| tape.unpatchify(&v[0], [frames, height, width], patch, order),
                &|v| {
                    let mut clip = v[0].clone();
                    places.iter().zip(&v[0]).for_each(|(place, number)| clip[*place] = *number);
                    clip
                },
            );
        }
    }
}

#[test]
fn more_than_one_piece() {
    // As many numbers as several tasks get, and as many channels.
    let shape = [2, 40, 20, 30];
    let places = places(shape, 1, PatchOrder::ChannelsFirst);
    check_forward(
        &[Input::normal(shape, 1)],
        0.0,
        &|tape, v| tape.patchify(&v[0], 1, PatchOrder::ChannelsFirst),
        &|v| places.iter().map(|place| v[0][*place]).collect(),
    );
    check_forward(
        &[Input::normal([2, 600, 40], 1)],
        0.0,
        &|tape, v| tape.unpatchify(&v[0], [20, 30], 1, PatchOrder::ChannelsFirst),
        &|v| {
            let mut image = v[0].clone();
            places.iter().zip(&v[0]).for_each(|(place, number)| image[*place] = *number);
            image
        },
    );
}

#[test]
fn the_result_has_its_shape_even_of_nothing() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    for (samples, channels) in [(2, 3), (0, 3), (2, 0)] {
        let x = Var::from(device.zeros([samples, channels, 4, 6], Dtype::F32).unwrap());
        let tokens = tape.patchify(&x, 2, PatchOrder::ChannelsLast).unwrap();
        assert_eq!(tokens.shape(), [samples, 6, channels * 4].into());
        let back = tape.unpatchify(&tokens, [4, 6], 2, PatchOrder::ChannelsLast).unwrap();
        assert_eq!(back.shape(), x.shape());
    }
    for (frames, channels) in [(2, 3), (0, 3), (2, 0)] {
        let shape = Shape::new(&[2, channels, frames, 4, 6]);
        let x = Var::from(device.zeros(shape, Dtype::F32).unwrap());
        let tokens = tape.patchify(&x, 2, PatchOrder::ChannelsLast).unwrap();
        assert_eq!(tokens.shape(), [2, frames * 6, channels * 4].into());
        let back = tape.unpatchify(&tokens, [frames, 4, 6], 2, PatchOrder::ChannelsLast).unwrap();
        assert_eq!(back.shape(), shape);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let order = PatchOrder::ChannelsFirst;
    let message = |x: &Var, patch| tape.patchify(x, patch, order).err().unwrap().to_string();
    let x = Var::from(device.zeros([1, 2, 4, 6], Dtype::F32).unwrap());
    assert_eq!(message(&x, 3), "patchify: height 4 is not a multiple of 3");
    assert_eq!(message(&x, 4), "patchify: width 6 is not a multiple of 4");
    assert_eq!(message(&x, 0), "patchify: height 4 is not a multiple of 0");
    // Of a clip the height of a frame counts, not that of all.
    let clip = Var::from(device.zeros(Shape::new(&[1, 2, 2, 5, 6]), Dtype::F32).unwrap());
    assert_eq!(message(&clip, 2), "patchify: height 5 is not a multiple of 2");
    let flat = Var::from(device.zeros([2, 4, 6], Dtype::F32).unwrap());
    assert_eq!(message(&flat, 2), "patchify: x of shape [2, 4, 6] has 3 dimensions, expected 4");
    let trained = "has no backward, but its input requires a gradient";
    assert_eq!(message(&tape.leaf(x.into_tensor()), 2), format!("patchify: {trained}"));

    let message = |tokens: &Var, size, patch| {
        tape.unpatchify(tokens, size, patch, order).err().unwrap().to_string()
    };
    let tokens = Var::from(device.zeros([1, 6, 8], Dtype::F32).unwrap());
    assert_eq!(
        message(&tokens, [4, 8], 2),
        "unpatchify: tokens has shape [1, 6, 8], expected [1, 8, 8]"
    );
    assert_eq!(
        message(&tokens, [9, 6], 3),
        "unpatchify: the width of tokens 8 is not a multiple of 9"
    );
    assert_eq!(
        message(&tokens, [4, 6], 0),
        "unpatchify: the width of tokens 8 is not a multiple of 0"
    );
    assert_eq!(
        message(&tape.leaf(tokens.into_tensor()), [4, 6], 2),
        format!("unpatchify: {trained}")
    );
}
