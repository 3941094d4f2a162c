"""Numbers in words. A word is one token in most tokenizers, but "17" is two digits."""

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty", "twenty-one"),
)
"""Words of the numbers from 0 to 21."""
