//! Position of a weight in a tensor with several weights: tensors of all experts, with gate and up concatenated or interleaved, and
//! transposed ones.

use std::ops::Range;

/// Position of a weight in a tensor of a file. Element `(row, column)` of the weight, which has the shape of
/// [`LayerConfig::shape`](super::LayerConfig::shape), is element `first + row * strides[0] + column * strides[1]` of the row-major tensor.
/// A one-dimensional weight is a single column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSlice {
    /// The tensor's name.
    pub tensor: String,
    /// Shape of the tensor in the file.
    pub shape: Vec<usize>,
    /// Rows and columns of the weight.
    pub size: [usize; 2],
    /// Index of the weight's first element in the tensor.
    pub first: usize,
    /// Distance of consecutive rows, and of consecutive columns, in elements.
    pub strides: [usize; 2],
    /// Range of the tensor's elements that belong to the same expert: the whole tensor, or the expert's part of it.
    pub part: Range<usize>,
}

impl WeightSlice {
    /// A weight that is the whole tensor.
    pub fn whole(tensor: String, shape: Vec<usize>) -> WeightSlice {
        let rows = shape.first().copied().unwrap_or(1);
        let columns: usize = shape.iter().skip(1).product();
        WeightSlice { tensor, shape, size: [rows, columns], first: 0, strides: [columns, 1], part: 0..rows * columns }
    }

    /// Whether the weight is the whole tensor, in the same order.
    pub fn is_whole(&self) -> bool {
        self.strides == [self.size[1], 1]
            && self.part.len() == self.size[0] * self.size[1]
            && self.part == (0..self.total())
    }

    fn total(&self) -> usize {
        self.shape.iter().product()
    }

    /// Range from the weight's first element to its last, including elements of other weights in between.
    pub fn span(&self) -> Range<usize> {
        let [rows, columns] = self.size;
        if rows * columns == 0 {
            return self.first..self.first;
        }
        self.first..self.first + (rows - 1) * self.strides[0] + (columns - 1) * self.strides[1] + 1
    }

    /// Extracts the weight in row-major order. `elements` are the tensor's elements from index `from` on.
    ///
    /// # Panics
    ///
    /// If `elements` does not cover [`WeightSlice::span`].
    pub fn gather(&self, elements: &[f32], from: usize) -> Vec<f32> {
        let [rows, columns] = self.size;
        let mut weight = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            let start = self.first - from + row * self.strides[0];
            weight.extend((0..columns).map(|column| elements[start + column * self.strides[1]]));
        }
        weight
    }

    /// Writes the row-major `weight` to `elements`, which are the tensor's elements from index `from` on.
    ///
    /// # Panics
    ///
    /// If `elements` does not cover [`WeightSlice::span`], or if `weight` has another size.
    pub fn scatter(&self, weight: &[f32], elements: &mut [f32], from: usize) {
        let [rows, columns] = self.size;
        assert_eq!(weight.len(), rows * columns, "elements of a weight in {}", self.tensor);
        for (row, values) in weight.chunks_exact(columns.max(1)).enumerate() {
            let start = self.first - from + row * self.strides[0];
            values.iter().enumerate().for_each(|(column, &v)| elements[start + column * self.strides[1]] = v);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_and_transposed_weights_round_trip() {
        // A tensor of shape [2 experts, 3 in, 2 x 2 out], in which gate and up are interleaved. The weight is expert 1's up, as [out, in].
        let part = 12..24;
        let up = WeightSlice {
            tensor: "t".into(),
            shape: vec![2, 3, 4],
            size: [2, 3],
            first: 13,
            strides: [2, 4],
            part: part.clone(),
        };
        let tensor: Vec<f32> = (0..24).map(|i| i as f32).collect();
        assert_eq!(up.span(), 13..24);
        let weight = up.gather(&tensor[13..24], 13);
        assert_eq!(weight, [13.0, 17.0, 21.0, 15.0, 19.0, 23.0]);
        let mut into = vec![0.0; 12];
        up.scatter(&weight, &mut into, part.start);
        assert_eq!(into, [0.0, 13.0, 0.0, 15.0, 0.0, 17.0, 0.0, 19.0, 0.0, 21.0, 0.0, 23.0]);
        assert!(!up.is_whole());
        assert!(WeightSlice::whole("w".into(), vec![4, 5]).is_whole());
        assert!(WeightSlice::whole("b".into(), vec![4]).is_whole());
    }
}
