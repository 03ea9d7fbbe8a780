"""The features of all images of a source as files: computed part by part, then written to several kinds."""
