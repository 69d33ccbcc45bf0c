//! Multimodal rotary positions (mrope; Wang et al., "Qwen2-VL", arXiv 2409.12191, section 2.1): a token of text has the same
//! position on the three axes time, height and width; those of an image begin at the next position on each, and text after
//! it goes on behind the largest. As transformers' `get_rope_index` counts still images.

use crate::model::encoder::stack::TokenLayout;

/// The position of each token on the three axes.
pub fn mrope_positions(layout: &TokenLayout) -> Vec<[usize; 3]> {
    let (mut positions, mut next) = (Vec::with_capacity(layout.n), 0);
    for image in &layout.images {
        let n_text = image.first.saturating_sub(positions.len());
        push_text(&mut positions, &mut next, n_text);
        for row in 0..image.rows {
            positions.extend((0..image.columns).map(|column| [next, next + row, next + column]));
        }
        next += image.rows.max(image.columns);
    }
    let n_text = layout.n.saturating_sub(positions.len());
    push_text(&mut positions, &mut next, n_text);
    positions
}

fn push_text(positions: &mut Vec<[usize; 3]>, next: &mut usize, n: usize) {
    positions.extend((*next..*next + n).map(|at| [at; 3]));
    *next += n;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::encoder::stack::ImageSpan;

    /// An image of 2 x 3 tokens after two of text, another of 1 x 1.
    #[test]
    fn text_goes_on_behind_the_largest_position_of_an_image() {
        let span = |first, rows, columns| ImageSpan { first, rows, columns };
        let layout = TokenLayout { n: 12, images: vec![span(2, 2, 3), span(10, 1, 1)] };
        let [time, height, width] = [0, 1, 2]
            .map(|axis| mrope_positions(&layout).iter().map(|at| at[axis]).collect::<Vec<_>>());
        assert_eq!(time, [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]);
        assert_eq!(height, [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]);
        assert_eq!(width, [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]);
        let text = mrope_positions(&TokenLayout { n: 3, images: Vec::new() });
        assert_eq!(text, [[0; 3], [1; 3], [2; 3]]);
    }
}
