//! Structures of 32-bit fields as the words that go to the device, and back.

use crate::Plain;

/// The words of values.
///
/// # Panics
/// The type is not made of words.
pub(crate) fn to_words<T: Plain>(values: &[T]) -> &[u32] {
    assert!(align_of::<T>() >= 4 && size_of::<T>().is_multiple_of(4), "a structure of words");
    // SAFETY: a `Plain` type is initialised bytes throughout, aligned for words and a whole number of them.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values) / 4) }
}

/// The `n` values that lie in `words` from `start` on.
///
/// # Panics
/// They are not inside, or the type is not made of words.
pub(crate) fn from_words<T: Plain>(words: &[u32], start: usize, n: usize) -> &[T] {
    assert!(align_of::<T>() == 4 && size_of::<T>().is_multiple_of(4), "a structure of words");
    let words = &words[start..start + n * size_of::<T>() / 4];
    // SAFETY: the words are inside, aligned, and any bits are a valid `Plain`.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), n) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::logits::RowOutput;

    #[test]
    fn a_structure_survives_the_way() {
        let outputs = [RowOutput { token: 7, logprob: -1.5, ..RowOutput::default() }; 2];
        let words = to_words(&outputs);
        assert_eq!(words.len(), 12);
        assert_eq!(words[6], 7);
        assert_eq!(from_words::<RowOutput>(words, 6, 1), &outputs[1..]);
    }
}
